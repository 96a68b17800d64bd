"""Targets that attend by code of their own (alibi, attention in chunks), and those that keep a state.

Both get transformers' own cache interface. Where all they ask of it is keys and values, its layers are slices of the
KVCache whose length depends on a row's position alone, as the plain path's (engine/cache.py), and transformers masks
them by position: so rows keep their bits in a fixed bucket, and a rollback is moving a length. A tree is verified path
by path, for attention of their own takes no mask of ours. Where they keep a state they run one row at a time.

Shapes: B batch (1), R rows, H hidden, K key/value heads, L attended length, E width of a key, U width of a value.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from eyas.engine.cache import attended_length, leaf_paths
from eyas.engine.forward import ModuleForward, keeps_state
from eyas.models.target import Target

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""How decoders call the past that they take and give."""


class _Slots(CacheLayerMixin):
    """A layer's part of the KVCache as transformers asks for it, the way its own static cache answers."""

    is_compileable, is_croppable, is_sliding = True, True, False

    def __init__(self, forward: "CacheForward", layer: int) -> None:
        super().__init__()
        self.forward, self.layer, self.is_initialized = forward, layer, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Buffers are made when written."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys [1, K, R, E] and values [1, K, R, U]; all rows that are attended over, masked ones included."""
        cache, length = self.forward.cache, self.forward.length
        cache.write(self.layer, key_states, value_states)
        return cache.keys[self.layer][:, :, :length], cache.values[self.layer][:, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.forward.length, 0

    def get_seq_length(self) -> int:
        return self.forward.cache.start

    def get_max_length(self) -> int:
        return self.forward.cache.capacity


class CacheForward(ModuleForward):
    """Attention by the target's own code over slices of the KVCache."""

    name = "own attention"

    def __init__(self, target: Target, boundaries: Sequence[int] = (), rows: int | None = None) -> None:
        super().__init__(target, boundaries, rows)
        self._past = Cache(layers=[_Slots(self, layer) for layer in range(target.num_hidden_layers)])
        self.length = self._start = 0
        self._laid: list[tuple[list[int], dict[int, tuple[Tensor, Tensor]]]] = []

    @staticmethod
    def unfit(target: Target) -> str | None:
        return keeps_state(target)

    def verify(self, ids: Sequence[int], start: int, parents: Sequence[int] | None = None) -> Tensor:
        paths = leaf_paths(list(range(-1, len(ids) - 1)) if parents is None else parents)
        self._laid, done = [], dict[int, tuple[int, int]]()
        states: list[dict[int | None, Tensor]] = []
        for path in paths:
            for first in _pieces(start, len(path), self.cache.block):
                piece = path[first.start : first.stop]
                last_states = self._bucket([ids[row] for row in piece], start + first.start)
                done |= {row: (len(states), place) for place, row in enumerate(piece) if row not in done}
                states.append({None: last_states, **self._states})
            if len(paths) > 1:
                self._laid.append((path, self._rows(start, len(path))))
        if len(states) == 1:
            return states[0][None]
        count = max(len(ids), self.rows or 0)
        order = [done[min(row, len(ids) - 1)] for row in range(count)]
        joined = {
            name: torch.cat([states[at][name][:, place, None] for at, place in order], dim=1) for name in states[0]
        }
        self._states = {name: state for name, state in joined.items() if name is not None}
        return joined[None]

    def keep(self, path: Sequence[int]) -> None:
        """Rows of the path laid last lie in the cache already; those of another are laid again."""
        kept = list(path)
        rows = next((rows for laid, rows in self._laid if laid[: len(kept)] == kept), {})
        for layer, (key, value) in rows.items():
            start = self._start
            self.cache.keys[layer][:, :, start : start + len(kept)] = key[:, :, : len(kept)]
            self.cache.values[layer][:, :, start : start + len(kept)] = value[:, :, : len(kept)]

    def _bucket(self, ids: Sequence[int], start: int) -> Tensor:
        """A chain whose real rows lie on one side of a length border."""
        return self._chunk([*ids, *[ids[-1]] * (max(len(ids), self.rows or 0) - len(ids))], start, start)

    def _prompt(self, ids: Sequence[int], start: int) -> Tensor:
        return self._chunk(ids, start, start + len(ids) - 1)

    def _chunk(self, ids: Sequence[int], start: int, position: int) -> Tensor:
        """Rows over the attended length of `position`."""
        self.cache.begin(start, len(ids), by_position=False)
        self.length = attended_length(position, self.cache.block)
        mask = torch.ones((1, self.length), dtype=torch.int64, device=self.cache.device)
        name = next(name for name in CACHE_NAMES if name in self._takes)
        given: dict[str, Any] = {name: self._past, "attention_mask": mask, "use_cache": True}
        return self._run(ids, range(start, start + len(ids)), **given).last_hidden_state

    def _rows(self, start: int, count: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Copies of what the cache holds of a path."""
        self._start, rows = start, slice(start, start + count)
        values = self.cache.values
        return {
            layer: (keys[:, :, rows].clone(), values[layer][:, :, rows].clone())
            for layer, keys in self.cache.keys.items()
        }


def _pieces(start: int, count: int, block: int) -> list[range]:
    """Rows 0..count - 1 from position `start`, cut where the attended length changes."""
    first = min(count, attended_length(start, block) - start)
    return [range(first), range(first, count)] if first < count else [range(count)]


class StateForward(ModuleForward):
    """A state of the target's own, which only goes forward: a prompt at once, then one row at a time."""

    name, rolls_back, grain = "own state", False, 2**40

    @staticmethod
    def unfit(target: Target) -> str | None:
        return None

    def verify(self, ids: Sequence[int], start: int, parents: Sequence[int] | None = None) -> Tensor:
        assert len(ids) == 1, "a state does not roll back, so nothing is drafted"
        return self._step(ids, start)

    def keep(self, path: Sequence[int]) -> None:
        """A row stands as soon as it is computed."""

    def _prompt(self, ids: Sequence[int], start: int) -> Tensor:
        self.cache.own = None
        return self._step(ids, start)

    def _step(self, ids: Sequence[int], start: int) -> Tensor:
        name = next(name for name in CACHE_NAMES if name in self._takes)
        output = self._run(ids, range(start, start + len(ids)), use_cache=True, **{name: self.cache.own})
        self.cache.own = output[name]
        return output.last_hidden_state
