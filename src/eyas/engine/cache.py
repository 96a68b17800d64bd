"""Keys and values in static buffers, written in place; rolling back is moving a length.

A row at position p attends over a slice whose length depends on p alone (`attended_length`), so that its result does
not depend on which forward computes it: kernels sum slices of different lengths in different orders (docs/engine.md).
What lies in the slice beyond p is masked: stale or zero, always finite.

A tree of drafted rows is given by `parents`: parents[i] is the row that row i follows, -1 for the one that follows the
cache. Its rows would lie in other slots than the same rows of a chain, and be summed in another order. Where bits
matter (`begin_paths`) slot is therefore position for a tree too: each path from the root to a leaf is laid into the
cache in turn and attended as the chain it is. Elsewhere (`begin_tree`, the draft's own rows) one masked call does.

Shapes: B batch (1), N query heads, K key/value heads, G = N / K heads a group, R rows, S = G * R stacked query rows,
L attended length, E width of a query and a key, U width of a value.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

LENGTH_BLOCK = 256
"""Attended lengths are multiples of this. Smaller saves attention at short texts, and meets more borders."""
ATTENTION = "eyas"
"""The name under which transformers' modules find `attend_cached`."""


def attended_length(position: int, block: int = LENGTH_BLOCK) -> int:
    """How many cache rows a query at `position` is computed over, masked ones included."""
    return (position // block + 1) * block


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    """The rows from the root to `row`, both included."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """Every path from the root to a row that none follows."""
    followed = set(parents)
    return [path_to(row, parents) for row in range(len(parents)) if row not in followed]


def branching(parents: Sequence[int] | None) -> Sequence[int] | None:
    """`parents` of a tree that branches; None of a chain, whose rows need not be told what they follow."""
    return None if parents is None or list(parents) == list(range(-1, len(parents) - 1)) else parents


def depths(parents: Sequence[int]) -> list[int]:
    """How many rows each row follows."""
    found: list[int] = []
    for row, parent in enumerate(parents):
        assert -1 <= parent < row, "a row follows an earlier one"
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


@dataclass
class Span:
    """One attention call of a forward: all its rows over the first `length` cache rows, `taken_R` of them its own.

    `path_D`: the rows laid into the cache before it, None where they lie there.
    """

    length: int
    visible_RL: Tensor
    taken_R: Tensor | None = None
    path_D: Tensor | None = None
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
        self.addresses: tuple[Any, Any] | None = None
        """Where every layer's buffers lie, once the compiled forward has looked (engine/native.py)."""
        self.moves = 0
        """How often the buffers were dropped: addresses of before are nobody's then."""
        self.start = self.rows = 0
        self.spans: list[Span] = []
        self._positions_R1 = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self._columns = torch.arange(0, device=device)
        self.tree: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of the latest forward's rows by layer, where they are a tree's that `keep` may still lay."""
        self.own: Any = None
        """The past of a model that keeps it itself (engine/own_past.py), which no row of this cache holds."""

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows. Growing drops what the buffers held: call it before a sequence starts."""
        if rows > self.capacity:
            self.capacity = attended_length(rows - 1, self.block)
            self.keys, self.values, self.addresses = {}, {}, None
            self.moves += 1
            self._columns = torch.arange(self.capacity, device=self.device)

    def copy(self, other: "KVCache", rows: int) -> None:
        """Take over the first `rows` rows of another text's cache of the same model."""
        assert rows <= min(self.capacity, other.capacity), "reserve() rows before copying"
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, buffer in theirs.items():
                if layer not in mine:
                    shape = (*buffer.shape[:2], self.capacity, buffer.shape[3])
                    mine[layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)
                mine[layer][:, :, :rows] = buffer[:, :, :rows]

    def begin(self, start: int, rows: int, *, by_position: bool = True) -> None:
        """Plan a forward over `rows` rows at positions start, start + 1, ...

        `by_position`: each row attends over `attended_length` of its own position, so rows on both sides of a border
        take two calls. A prefill, which every way of decoding shares, does with one.
        """
        first, last = attended_length(start, self.block), attended_length(start + rows - 1, self.block)
        assert not by_position or last - first <= self.block, "more rows than a length block"
        self._start(start, rows, last)
        self._positions_R1 = self._columns[start : start + rows, None]
        lengths = [first, last] if by_position and first != last else [last]
        self.spans = [Span(length, self._visible(length)) for length in lengths]
        if len(lengths) == 2:
            self.spans[1].taken_R = (self._positions_R1[:, 0] >= first).nonzero()[:, 0]

    def begin_paths(self, start: int, parents: Sequence[int], rows: int) -> None:
        """Plan a forward over a tree whose root is at position `start`, each row bit-equal to that of its path alone.

        `rows` >= len(parents): what is beyond the tree is padding. The cache keeps no row of it until `keep`.
        """
        row_depths = depths(parents)
        padded = torch.tensor(row_depths + [0] * (rows - len(parents)), device=self.device)
        self._start(start, rows, attended_length(start + max(row_depths), self.block))
        self._positions_R1 = start + padded[:, None]
        self.spans, done = [], set[int]()
        for path in leaf_paths(parents):
            laid: Tensor | None = torch.tensor(path, device=self.device)
            for length in dict.fromkeys(attended_length(start + row_depths[row], self.block) for row in path):
                own = [
                    r for r in path if r not in done and attended_length(start + row_depths[r], self.block) == length
                ]
                if own:
                    taken = torch.tensor(own, device=self.device)
                    self.spans.append(Span(length, self._visible(length), taken, laid))
                    laid = None
            done.update(path)

    def begin_tree(self, start: int, parents: Sequence[int], rows: int) -> None:
        """Plan a forward over the last `rows` rows of a growing tree.

        Row i lies in slot start + i and sees the slots below `start`, the rows it follows and itself. Its position is
        start + its depth, whatever its slot.
        """
        first = start + len(parents) - rows
        length = attended_length(start + len(parents) - 1, self.block)
        self._start(first, rows, length)
        visible = (self._columns[None, :length] < start).repeat(rows, 1)
        for index, row in enumerate(range(len(parents) - rows, len(parents))):
            visible[index, [start + ancestor for ancestor in path_to(row, parents)]] = True
        self._positions_R1 = start + torch.tensor(depths(parents)[-rows:], device=self.device)[:, None]
        self.spans = [Span(length, visible)]

    def keep(self, path: Sequence[int]) -> None:
        """Rows `path` of the latest forward stand, at start, start + 1, ... A chain's lie there already."""
        laid = torch.tensor(list(path), device=self.device)
        for layer, (key, value) in self.tree.items():
            self.write(layer, key, value, laid)

    def _start(self, start: int, rows: int, last: int) -> None:
        assert last <= self.capacity, f"reserve() rows before a forward over {start + rows}"
        self.start, self.rows, self.tree = start, rows, {}

    def _visible(self, length: int) -> Tensor:
        return self._columns[None, :length] <= self._positions_R1

    def write(self, layer: int, key_BKRE: Tensor, value_BKRU: Tensor, rows: Tensor | None = None) -> None:
        keys, values = self.buffers(layer, key_BKRE.shape[1], key_BKRE.shape[3], value_BKRU.shape[3])
        for buffer, states in ((keys, key_BKRE), (values, value_BKRU)):
            chosen = states if rows is None else states[:, :, rows]
            buffer[:, :, self.start : self.start + chosen.shape[2]] = chosen

    def attend(
        self,
        layer: int,
        query_BNRE: Tensor,
        key_BKRE: Tensor,
        value_BKRU: Tensor,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Store this forward's keys and values of `layer`, attend; context [B, N, R, U].

        `softcap` bounds the scores (Gemma 2); `sinks_N` are scores that take their share of every row's softmax and
        give nothing (gpt-oss).
        """
        keys, values = self.buffers(layer, key_BKRE.shape[1], key_BKRE.shape[3], value_BKRU.shape[3])
        if self.spans[0].path_D is None:
            self.write(layer, key_BKRE, value_BKRU)
        else:
            self.tree[layer] = key_BKRE, value_BKRU
        group = query_BNRE.shape[1] // key_BKRE.shape[1]
        merged: Tensor | None = None
        for span in self.spans:
            if span.path_D is not None:
                self.write(layer, key_BKRE, value_BKRU, span.path_D)
            slices = keys[:, :, : span.length], values[:, :, : span.length]
            context = attend_slice(query_BNRE, *slices, self._mask(span, group, window), scale, softcap, sinks_N)
            if merged is None:
                merged = context
            else:
                merged[:, :, span.taken_R] = context[:, :, span.taken_R]
        assert merged is not None, "begin() plans at least one call"
        return merged

    def buffers(self, layer: int, heads: int, width: int, value_width: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys [1, K, capacity, E] and values [1, K, capacity, U] of `layer`, made at first use. U None is E."""
        if layer not in self.keys:
            for buffers, columns in ((self.keys, width), (self.values, value_width or width)):
                shape = (1, heads, self.capacity, columns)
                buffers[layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self.keys[layer], self.values[layer]

    def _mask(self, span: Span, group: int, window: int | None) -> Tensor:
        """Additive mask [S, L], made once a forward for all layers alike."""
        mask = span.masks.get((group, window))
        if mask is None:
            columns_1L = self._columns[None, : span.length]
            mask = additive_mask(span.visible_RL, columns_1L, self._positions_R1, group, window, self.dtype)
            span.masks[group, window] = mask
        return mask


def additive_mask(
    visible_RL: Tensor, columns_1L: Tensor, positions_R1: Tensor, group: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """[S, L]: 0 where a row sees a slot, minus infinity where it does not, or no longer through its window."""
    if window is not None:
        visible_RL = visible_RL & (columns_1L > positions_R1 - window)
    mask = torch.zeros(visible_RL.shape, dtype=dtype, device=visible_RL.device)
    return mask.masked_fill_(~visible_RL, float("-inf")).repeat(group, 1)


def attend_slice(
    query_BNRE: Tensor,
    key_BKLE: Tensor,
    value_BKLU: Tensor,
    mask_SL: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Attention of a forward's rows over a slice of the cache; context [B, N, R, U]."""
    heads, rows = query_BNRE.shape[1:3]
    # The query heads of a group become rows of one head: no copy of keys and values for grouped queries.
    query = query_BNRE.reshape(1, key_BKLE.shape[1], -1, query_BNRE.shape[-1])
    if softcap is None and sinks_N is None:
        attend = nn.functional.scaled_dot_product_attention
        return attend(query, key_BKLE, value_BKLU, attn_mask=mask_SL, scale=scale).view(1, heads, rows, -1)
    return _attend_in_steps(query, key_BKLE, value_BKLU, mask_SL, scale, softcap, sinks_N).view(1, heads, rows, -1)


def _attend_in_steps(
    query_BKSE: Tensor,
    key_BKLE: Tensor,
    value_BKLU: Tensor,
    mask_SL: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Attention as its definition says, for what torch's fused one lacks; context [B, K, S, U]."""
    scores = (query_BKSE @ key_BKLE.transpose(-1, -2)).float() * (scale or query_BKSE.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask_SL
    if sinks_N is not None:
        groups, rows = scores.shape[1:3]
        sinks = sinks_N.float().view(groups, -1, 1).expand(-1, -1, rows * groups // sinks_N.shape[0])
        scores = torch.cat([scores, sinks.reshape(1, groups, rows, 1)], dim=-1)
    return torch.softmax(scores, dim=-1)[..., : key_BKLE.shape[2]].to(value_BKLU.dtype) @ value_BKLU


class SideBySide:
    """Several texts' caches in one forward, the n-th of its batch being the n-th text's."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = caches

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
        """KVCache.attend of each text's own rows; context [B, N, R, U]."""
        ones = [1] * len(self.caches)
        parts = zip(self.caches, *(states.split_with_sizes(ones) for states in (query, key, value)), strict=True)
        return torch.cat([cache.attend(layer, *states, *more) for cache, *states in parts])


class Running(Protocol):
    """What attends in a forward."""

    def attend(
        self,
        layer: int,
        query_BNRE: Tensor,
        key_BKRE: Tensor,
        value_BKRU: Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks_N: Tensor | None,
        /,
    ) -> Tensor:
        """KVCache.attend."""
        ...


RUNNING: ContextVar[Running | None] = ContextVar("RUNNING", default=None)
"""The cache of the forward that runs. No keyword of that forward, for some architectures hand none on to attention."""


def attend_cached(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface over the KVCache that runs; without one, transformers' own SDPA."""
    cache = RUNNING.get()
    if cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    window, softcap, sinks = (kwargs.get(name) for name in ("sliding_window", "softcap", "s_aux"))
    context = cache.attend(layer_index(module), query, key, value, scaling, window, softcap, sinks)
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
