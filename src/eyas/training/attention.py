"""TTT attention: what a row may see at each unrolled step.

Row t at step s sees the step-0 keys 0..t of its document and its own key of each step 1..s; nothing else. The rotary
position at step s is t + s. So a row's steps are the chain a server would draft from it: keys 1..s stand for the
drafted tokens. Source: EAGLE cnets.py (training), training.md 2.3; the tests hold a loop-based oracle.

Shapes: B batch (1: documents are packed), T packed rows, R queried rows, N query heads, K key heads, G = N / K,
E width of a query and a key, U width of a value, L a document's rows, Q its queried rows, S later steps.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.training.rows import Rows


class TTTAttention:
    """The draft's `Attend` hook over one packed batch: `begin(step)`, then one call a layer."""

    def __init__(self, rows: Rows, window: int | None = None) -> None:
        self.rows, self.window = rows, window
        self.step = 0
        self.prefix: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Layer to each document's step-0 keys [B, K, L, E] and values [B, K, L, U]. Split once: the gradient of a
        split is one concatenation, that of a slice a tensor of zeros as large as the whole batch."""
        self.own: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Layer to the current rows' own keys [B, K, R, E] and values [B, K, R, U] of each later step."""
        self.counts = [rows.per_document(step) for step in range(rows.steps)]
        self.masks: dict[tuple[int, int], Tensor] = {}

    def begin(self, step: int) -> None:
        """Start a step; the rows it drops take their own keys with them."""
        self.step = step
        if step > 1:
            inside = self.rows.inside[step]
            for layer, states in self.own.items():
                self.own[layer] = [(key[:, :, inside], value[:, :, inside]) for key, value in states]

    def __call__(self, layer: int, query_BNRE: Tensor, key_BKTE: Tensor, value_BKTU: Tensor) -> Tensor:
        """Context [B, N, R, U]. At step 0 keys are all rows' (queries may be fewer); later both are `index[step]`."""
        if self.step == 0:
            lengths = [end - start for start, end in pairwise(self.rows.starts)]
            states = (key_BKTE.split(lengths, dim=2), value_BKTU.split(lengths, dim=2))
            self.prefix[layer], self.own[layer] = list(zip(*states, strict=True)), []
        else:
            self.own[layer].append((key_BKTE, value_BKTU))
        every_row = self.step == 0 and query_BNRE.shape[2] == self.rows.positions_T.numel()
        counts = [key.shape[2] for key, _ in self.prefix[layer]] if every_row else self.counts[self.step]
        queries = query_BNRE.split(counts, dim=2)
        later = [[states.split(counts, dim=2) for states in step] for step in self.own[layer]]
        contexts: list[Tensor] = []
        for document, prefix in enumerate(self.prefix[layer]):
            if counts[document]:
                own = [(keys[document], values[document]) for keys, values in later]
                contexts.append(self._document(document, queries[document], *prefix, own, every_row))
        return torch.cat(contexts, dim=2) if contexts else query_BNRE[..., : value_BKTU.shape[-1]]

    def _document(
        self,
        document: int,
        query_BNQE: Tensor,
        key_BKLE: Tensor,
        value_BKLU: Tensor,
        own: list[tuple[Tensor, Tensor]],
        every_row: bool,
    ) -> Tensor:
        length = key_BKLE.shape[2]
        if every_row:
            mask_QL = _causal(torch.arange(length, device=query_BNQE.device), length, self.window, 0)
        else:
            mask_QL = self._mask(document, length)
        if own:
            return attend_with_own(query_BNQE, key_BKLE, value_BKLU, own, mask_QL)
        return F.scaled_dot_product_attention(
            query_BNQE, key_BKLE, value_BKLU, attn_mask=mask_QL.to(query_BNQE.dtype), enable_gqa=True
        )

    def _mask(self, document: int, length: int) -> Tensor:
        """Made once a step for all layers."""
        place = (self.step, document)
        if place not in self.masks:
            rows_Q = self.rows.index[self.step].split(self.counts[self.step])[document]
            self.masks[place] = _causal(rows_Q - self.rows.starts[document], length, self.window, self.step)
        return self.masks[place]


def _causal(rows_Q: Tensor, length: int, window: int | None, step: int) -> Tensor:
    """Additive mask [Q, L] of the step-0 keys: 0 at keys 0..t (within the window of t + step), -inf elsewhere."""
    keys_L = torch.arange(length, device=rows_Q.device)
    visible = keys_L[None] <= rows_Q[:, None]
    if window is not None:
        visible = visible & (keys_L[None] > rows_Q[:, None] + step - window)
    return torch.zeros(visible.shape, device=rows_Q.device).masked_fill_(~visible, float("-inf"))


def attend_with_own(
    query_BNQE: Tensor,
    key_BKLE: Tensor,
    value_BKLU: Tensor,
    own: list[tuple[Tensor, Tensor]],
    mask_QL: Tensor,
) -> Tensor:
    """One softmax over the masked prefix and each row's own later keys. Context [B, N, Q, U]."""
    batch, heads, queries, width = query_BNQE.shape
    groups = key_BKLE.shape[1]
    query_BKGQE = (query_BNQE * width**-0.5).view(batch, groups, -1, queries, width)
    key_BKQSE = torch.stack([key for key, _ in own], dim=3)
    value_BKQSU = torch.stack([value for _, value in own], dim=3)
    scores_BKGQL = query_BKGQE @ key_BKLE[:, :, None].transpose(-1, -2) + mask_QL
    own_BKGQS = torch.einsum("bkgqe,bkqse->bkgqs", query_BKGQE, key_BKQSE)
    weights = torch.cat([scores_BKGQL, own_BKGQS], dim=-1).float().softmax(dim=-1).to(query_BNQE.dtype)
    prefix, rest = weights.split([key_BKLE.shape[2], len(own)], dim=-1)
    context = prefix @ value_BKLU[:, :, None] + torch.einsum("bkgqs,bkqsu->bkgqu", rest, value_BKQSU)
    return context.reshape(batch, heads, queries, -1)
