"""Keys and values in static buffers, written in place; rolling back is moving a length.

A row at position p attends over a slice whose length depends on p alone (`attended_length`), so that its result does
not depend on which forward computes it: kernels sum slices of different lengths in different orders (docs/engine.md).
What lies in the slice beyond p is masked: stale or zero, always finite.

Shapes: B batch (1), N query heads, K key/value heads, G = N / K heads a group, R rows, S = G * R stacked query rows,
L attended length, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from eyas.errors import InputError

LENGTH_BLOCK = 256
"""Attended lengths are multiples of this. Smaller saves attention at short texts, and meets more borders."""
ATTENTION = "eyas"
"""The name under which transformers' modules find `attend_cached`."""


def attended_length(position: int, block: int = LENGTH_BLOCK) -> int:
    """How many cache rows a query at `position` is computed over, masked ones included."""
    return (position // block + 1) * block


@dataclass
class Span:
    """One attention call of a forward: all its rows over the first `length` cache rows."""

    length: int
    visible_RL: Tensor
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


class KVCache:
    """Keys and values of one sequence, for all layers of one model.

    A forward is `begin(start, rows, ...)`, then one `attend` a layer. `start` may lie below an earlier forward's end:
    its rows are overwritten, which is all a rollback is.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu", block: int = LENGTH_BLOCK) -> None:
        self.dtype, self.device, self.block = dtype, device, block
        self.capacity = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.start = self.rows = 0
        self.spans: list[Span] = []
        self.late_R: Tensor | None = None
        self._columns = torch.arange(0, device=device)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows. Growing drops what the buffers held: call it before a sequence starts."""
        if rows > self.capacity:
            self.capacity = attended_length(rows - 1, self.block)
            self.keys, self.values = {}, {}
            self._columns = torch.arange(self.capacity, device=self.device)

    def begin(self, start: int, rows: int, *, by_position: bool = True) -> None:
        """Plan a forward over `rows` rows at positions start, start + 1, ...

        `by_position`: each row attends over `attended_length` of its own position, so rows on both sides of a border
        take two calls. A prefill, which every way of decoding shares, does with one.
        """
        first, last = attended_length(start, self.block), attended_length(start + rows - 1, self.block)
        assert last <= self.capacity, f"reserve() {start + rows} rows before a forward over them"
        assert not by_position or last - first <= self.block, "more rows than a length block"
        self.start, self.rows = start, rows
        positions_R1 = self._columns[start : start + rows, None]
        lengths = [first, last] if by_position and first != last else [last]
        self.spans = [Span(length, self._columns[None, :length] <= positions_R1) for length in lengths]
        self.late_R = positions_R1[:, 0] >= first if len(lengths) == 2 else None

    def attend(
        self,
        layer: int,
        query_BNRE: Tensor,
        key_BKRE: Tensor,
        value_BKRE: Tensor,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Store this forward's keys and values of `layer`, attend; context [B, N, R, E]."""
        keys, values = self._buffers(layer, key_BKRE, value_BKRE)
        end = self.start + self.rows
        keys[:, :, self.start : end] = key_BKRE
        values[:, :, self.start : end] = value_BKRE
        heads, groups = query_BNRE.shape[1], key_BKRE.shape[1]
        # The query heads of a group become rows of one head: no copy of keys and values for grouped queries.
        query = query_BNRE.reshape(1, groups, -1, query_BNRE.shape[-1])
        contexts = []
        for span in self.spans:
            context = nn.functional.scaled_dot_product_attention(
                query,
                keys[:, :, : span.length],
                values[:, :, : span.length],
                attn_mask=self._mask(span, heads // groups, window),
                scale=scale,
            )
            contexts.append(context.view(1, heads, self.rows, -1))
        if self.late_R is None:
            return contexts[0]
        return torch.where(self.late_R[:, None], contexts[1], contexts[0])

    def _buffers(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.keys:
            for buffers, states in ((self.keys, key), (self.values, value)):
                shape = (1, states.shape[1], self.capacity, states.shape[3])
                buffers[layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self.keys[layer], self.values[layer]

    def _mask(self, span: Span, group: int, window: int | None) -> Tensor:
        """Additive mask [S, L], made once a forward for all layers alike."""
        mask = span.masks.get((group, window))
        if mask is None:
            visible = span.visible_RL
            if window is not None:
                first_R1 = self._columns[self.start : self.start + self.rows, None] - window
                visible = visible & (self._columns[None, : span.length] > first_R1)
            mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
            mask = mask.masked_fill_(~visible, float("-inf")).repeat(group, 1)
            span.masks[group, window] = mask
        return mask


def attend_cached(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    eyas_cache: KVCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface over a KVCache; without one, transformers' own SDPA.

    Raises InputError for what a layer asks that this attention does not do (soft-capped scores, sinks).
    """
    if eyas_cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise InputError(
                wanted="a target with plain scaled dot-product attention",
                got=f"attention with {name} in {type(module).__name__}",
                where="the embedded engine",
                next="serve this target with --engine sglang or vllm",
            )
    context = eyas_cache.attend(layer_index(module), query, key, value, scaling, kwargs.get("sliding_window"))
    return context.transpose(1, 2).contiguous(), None


def layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    assert isinstance(index, int), f"{type(module).__name__} does not know its layer"
    return index


def register() -> None:
    """Make `attn_implementation="eyas"` known to transformers."""
    AttentionInterface.register(ATTENTION, attend_cached)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
