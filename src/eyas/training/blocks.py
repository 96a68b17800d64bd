"""Runs of consecutive rows over the prefix they see: attention whose scores exist a block at a time.

On a CPU torch's flash kernel attends to a block; elsewhere, and where a value is wider than a key, plain products do.
Both give the log sum exp of the scores, and both go back from a context and a log sum exp that other keys were merged
into: exp(score - log sum exp) is then a key's share of the whole, which is all that the backward pass asks for (so ring
attention does it, arXiv 2310.01889).

Shapes: B batch, N query heads, K key heads, G = N / K, Q a block's rows, L its keys, E width of a query and a key,
U width of a value, W a band's columns.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256
"""The most rows in a block: at most half of them is the share of masked scores it computes."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Block:
    """Rows of one document that follow one another, and the step-0 keys that any of them sees."""

    rows: slice
    """Among the queried rows."""
    keys: slice
    """Among all rows; the last is the last row's own."""
    before: int
    """Keys before the first row."""
    reach: int | None
    """How many step-0 keys a row sees, itself included, under a sliding window."""

    def mask(self, band_QW: Tensor) -> Tensor:
        """Additive [Q, L], a view."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        first = band_QW.shape[1] - band_QW.shape[0] - self.before
        return band_QW[:rows, first : first + keys]


def reach(window: int | None, step: int) -> int | None:
    """Step-0 keys that a row at rotary position t + step sees of the window that ends there."""
    return None if window is None else window - step


def blocks_of(index_R: Tensor, starts: tuple[int, ...], window: int | None, step: int) -> list[Block]:
    """Blocks that cover rows `index_R`, ascending; `starts` as in `Rows`. None where no step-0 key is in reach."""
    sees = reach(window, step)
    if not len(index_R) or (sees is not None and sees <= 0):
        return []
    index_R = index_R.cpu()
    gaps = ((index_R[1:] - index_R[:-1] != 1).nonzero()[:, 0] + 1).tolist()
    borders = torch.searchsorted(index_R, torch.tensor(starts)).tolist()
    blocks: list[Block] = []
    for first, last in pairwise(sorted({0, len(index_R), *gaps, *borders})):
        row = int(index_R[first])
        start = starts[bisect_right(starts, row) - 1]
        size = -(-(last - first) // -(-(last - first) // ROWS))
        for a in range(first, last, size):
            b, at = min(a + size, last), row + a - first
            oldest = start if sees is None else max(start, at - sees + 1)
            blocks.append(Block(slice(a, b), slice(oldest, at + b - a), at - oldest, sees))
    return blocks


def band(blocks: list[Block], like: Tensor) -> Tensor:
    """The additive mask [Q, W] that every block's is a part of: 0 at keys up to the row's own, within its reach, and
    -inf elsewhere. Its last Q columns are the keys of the rows themselves."""
    rows = max((block.rows.stop - block.rows.start for block in blocks), default=0)
    before = max((block.before for block in blocks), default=0)
    row_Q = torch.arange(rows, device=like.device)[:, None]
    key_W = torch.arange(-before, rows, device=like.device)[None]
    visible = key_W <= row_Q
    if blocks and blocks[0].reach is not None:
        visible = visible & (key_W > row_Q - blocks[0].reach)
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))


def attend(query: Tensor, key: Tensor, value: Tensor, mask_QL: Tensor) -> tuple[Tensor, Tensor]:
    """Context [B, N, Q, U] and float32 log sum exp [B, N, Q] of queries [B, N, Q, E] over keys [B, K, L, .]."""
    if not _flashes(query, value):
        return attend_plainly(query, key, value, mask_QL)
    wider = query.shape[-1] - value.shape[-1]
    context, log_sum = _flash(query, key, F.pad(value, (0, wider)), attn_mask=mask_QL[None, None])
    return context[..., : value.shape[-1]], log_sum


def attend_back(
    grad: Tensor, context: Tensor, log_sum: Tensor, query: Tensor, key: Tensor, value: Tensor, mask_QL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from those of `context`, which like `log_sum` may be of more keys."""
    if not _flashes(query, value):
        return attend_plainly_back(grad, context, log_sum, query, key, value, mask_QL)
    width, wider = value.shape[-1], query.shape[-1] - value.shape[-1]
    grad, context, value = (F.pad(states, (0, wider)) for states in (grad, context, value))
    found = _flash_back(grad, query, key, value, context, log_sum, 0.0, False, attn_mask=mask_QL[None, None])
    return found[0], found[1], found[2][..., :width]


def _flashes(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and value.shape[-1] <= query.shape[-1]


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, mask_QL: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` by plain products."""
    scores = _scores(query, key, mask_QL)
    log_sum = scores.logsumexp(-1, keepdim=True)
    context = (scores - log_sum).exp().to(value.dtype) @ value[:, :, None]
    return context.flatten(1, 2), log_sum.flatten(1, 2)[..., 0]


def attend_plainly_back(
    grad: Tensor, context: Tensor, log_sum: Tensor, query: Tensor, key: Tensor, value: Tensor, mask_QL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_back` by plain products."""
    grad, context, log_sum = (each.unflatten(1, (key.shape[1], -1)) for each in (grad, context, log_sum))
    shares = (_scores(query, key, mask_QL) - log_sum[..., None]).exp().to(grad.dtype)
    grad_value = (shares.transpose(-1, -2) @ grad).sum(2)
    mean = (grad * context).sum(-1, keepdim=True)
    slopes = shares * (grad @ value[:, :, None].transpose(-1, -2) - mean) * query.shape[-1] ** -0.5
    grad_key = (slopes.transpose(-1, -2) @ query.unflatten(1, (key.shape[1], -1))).sum(2)
    return (slopes @ key[:, :, None]).flatten(1, 2), grad_key, grad_value


def _scores(query: Tensor, key: Tensor, mask_QL: Tensor) -> Tensor:
    """float32 [B, K, G, Q, L]."""
    grouped = query.unflatten(1, (key.shape[1], -1)) * query.shape[-1] ** -0.5
    return (grouped @ key[:, :, None].transpose(-1, -2)).float() + mask_QL
