"""TTT attention: what a row may see at each unrolled step.

Row t at step s sees the step-0 keys 0..t of its document and its own key of each step 1..s; nothing else. The rotary
position at step s is t + s. So a row's steps are the chain a server would draft from it: keys 1..s stand for the
drafted tokens. Source: EAGLE cnets.py (training), training.md 2.3; the tests hold a loop-based oracle.

No matrix of all rows by all keys is made or kept: a block of rows attends to its prefix (blocks.py), whose log sum exp
merges it with the row's own later keys, and the backward pass computes each block's scores anew.

Shapes: B batch (1: documents are packed), T packed rows, R queried rows, N query heads, K key heads, G = N / K,
E width of a query and a key, U width of a value, S own keys of a row.
"""

from typing import Any

import torch
from torch import Tensor

from eyas.training.blocks import Block, attend, attend_back, band, blocks_of
from eyas.training.rows import Rows


class TTTAttention:
    """The draft's `Attend` hook over one packed batch: `begin(step)`, then one call a layer."""

    def __init__(self, rows: Rows, window: int | None = None) -> None:
        self.rows, self.window = rows, window
        self.prefix: dict[int, tuple[Tensor, Tensor]] = {}
        """Layer to all rows' step-0 keys [B, K, T, E] and values [B, K, T, U]."""
        self.own: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Layer to keys and values [B, K, R[i], .] of each later step i, of the rows supervised there."""
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start a step."""
        self.step, index = step, self.rows.index
        self.blocks: dict[bool, list[Block]] = {}
        seen = range(1, step + 1) if self.window is None else range(max(1, step + 1 - self.window), step + 1)
        self.places = [(i, torch.searchsorted(index[i], index[step])) for i in seen]
        """The later steps whose own keys are seen, and where their rows hold this step's."""

    def __call__(self, layer: int, query_BNRE: Tensor, key_BKTE: Tensor, value_BKTU: Tensor) -> Tensor:
        """Context [B, N, R, U]. At step 0 keys are all rows' (queries may be fewer); later both are `index[step]`."""
        device = query_BNRE.device.type
        if torch.is_autocast_enabled(device):
            # on a CPU torch's flash kernel goes back in bfloat16 at a third of its float32 rate (docs/lab.md)
            dtype = torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)
            query_BNRE, key_BKTE, value_BKTU = (states.to(dtype) for states in (query_BNRE, key_BKTE, value_BKTU))
        if self.step == 0:
            self.prefix[layer], self.own[layer] = (key_BKTE, value_BKTU), []
        else:
            self.own[layer].append((key_BKTE, value_BKTU))
        own = [states for i, _ in self.places for states in self.own[layer][i - 1]]
        blocks = self._blocks(every_row=self.step == 0 and query_BNRE.shape[2] == self.rows.positions_T.numel())
        places = [place for _, place in self.places]
        return MergedAttention.apply(blocks, places, query_BNRE, *self.prefix[layer], *own)

    def _blocks(self, every_row: bool) -> list[Block]:
        """Made once a step for all layers."""
        if every_row not in self.blocks:
            index = torch.arange(self.rows.positions_T.numel()) if every_row else self.rows.index[self.step]
            self.blocks[every_row] = blocks_of(index, self.rows.starts, self.window, self.step)
        return self.blocks[every_row]


class MergedAttention(torch.autograd.Function):
    """Context [B, N, R, U] of one softmax over each row's prefix (`blocks`) and its own later keys.

    `own`: key [B, K, R[i], E] and value [B, K, R[i], U] of each later step in turn, `places` where in them the R rows
    lie. Kept for the backward pass: the arguments, the context, its log sum exp and the own keys' shares.
    """

    @staticmethod
    def forward(
        ctx: Any,
        blocks: list[Block],
        places: list[Tensor],
        query_BNRE: Tensor,
        key_BKTE: Tensor,
        value_BKTU: Tensor,
        *own: Tensor,
    ) -> Tensor:
        context = query_BNRE.new_zeros((*query_BNRE.shape[:3], value_BKTU.shape[-1]))
        log_sum_BNR = query_BNRE.new_full(query_BNRE.shape[:3], float("-inf"), dtype=torch.float32)
        mask = band(blocks, query_BNRE)
        for block in blocks:
            rows, keys = block.rows, block.keys
            found = attend(query_BNRE[:, :, rows], key_BKTE[:, :, keys], value_BKTU[:, :, keys], block.mask(mask))
            context[:, :, rows], log_sum_BNR[:, :, rows] = found
        shares_SBNR: list[Tensor] = []
        if own:
            chosen = _chosen(own, places)
            scale, query_BKGRE = query_BNRE.shape[-1] ** -0.5, _grouped(query_BNRE, key_BKTE)
            scores = [(query_BKGRE * key).sum(-1).flatten(1, 2).float() * scale for key, _ in chosen]
            before = log_sum_BNR
            log_sum_BNR = torch.stack([before, *scores]).logsumexp(0)
            shares_SBNR = [(score - log_sum_BNR).exp() for score in scores]
            context = context * (before - log_sum_BNR).exp()[..., None].to(context.dtype)
            grouped = _grouped(context, key_BKTE)
            for share, (_, value) in zip(shares_SBNR, chosen, strict=True):
                grouped.addcmul_(_grouped(share[..., None], key_BKTE).to(value.dtype), value)
        ctx.blocks, ctx.places = blocks, places
        ctx.save_for_backward(query_BNRE, key_BKTE, value_BKTU, context, log_sum_BNR, *own, *shares_SBNR)
        return context

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, context, log_sum, *rest = ctx.saved_tensors
        own, shares_SBNR = rest[: 2 * len(ctx.places)], rest[2 * len(ctx.places) :]
        (grad_BNRU,) = grads
        grad_query, grad_key, grad_value = (torch.zeros_like(states) for states in (query, key, value))
        mask = band(ctx.blocks, query)
        for block in ctx.blocks:
            rows, keys = block.rows, block.keys
            merged = context[:, :, rows], log_sum[:, :, rows]
            seen = query[:, :, rows], key[:, :, keys], value[:, :, keys], block.mask(mask)
            found = attend_back(grad_BNRU[:, :, rows], *merged, *seen)
            grad_query[:, :, rows] = found[0]
            grad_key[:, :, keys] += found[1]
            grad_value[:, :, keys] += found[2]
        grads_own: list[Tensor] = []
        if own:
            grad, asked, into = (_grouped(states, key) for states in (grad_BNRU, query, grad_query))
            mean_BKGR = _grouped((grad_BNRU * context).sum(-1, keepdim=True), key)
            for place, share, pair, states in zip(
                ctx.places, shares_SBNR, _chosen(own, ctx.places), _pairs(own), strict=True
            ):
                share = _grouped(share[..., None].to(query.dtype), key)
                slope = share * ((grad * pair[1]).sum(-1, keepdim=True) - mean_BKGR) * query.shape[-1] ** -0.5
                into.addcmul_(slope, pair[0])
                grads_own += [_placed(slope * asked, place, states[0]), _placed(share * grad, place, states[1])]
        return None, None, grad_query, grad_key, grad_value, *grads_own


def _pairs(own: Any) -> list[tuple[Tensor, Tensor]]:
    return list(zip(own[::2], own[1::2], strict=True))


def _grouped(states_BNRE: Tensor, key_BKTE: Tensor) -> Tensor:
    """By key head and the query heads of it [B, K, G, R, E], a view."""
    return states_BNRE.unflatten(1, (key_BKTE.shape[1], -1))


def _chosen(own: Any, places: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Key and value [B, K, 1, R, .] of each later step for the rows at work."""
    return [
        (key.index_select(2, place)[:, :, None], value.index_select(2, place)[:, :, None])
        for place, (key, value) in zip(places, _pairs(own), strict=True)
    ]


def _placed(grad_BKGRE: Tensor, place: Tensor, like_BKRE: Tensor) -> Tensor:
    """A gradient by query head of the rows at work, summed by key head, among all rows of its step."""
    summed = grad_BKGRE.sum(2)
    if len(place) == like_BKRE.shape[2]:
        return summed
    return torch.zeros_like(like_BKRE).index_copy_(2, place, summed)
