"""The plain path whose verify forwards are recorded steps (engine/graphs.py): one for each row bucket, attended length
and, of trees, number of paths.

Eager are prompts, forwards whose rows attend over two lengths (a round in about a hundred), and texts with a cache of
their own, as the server's. The head is one product and stays outside.

Shapes: R rows, H hidden, A width of the concatenated taps, D slots laid, P paths, L attended length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eyas.engine.cache import attended_length, branching, depths, leaf_paths
from eyas.engine.forward import TargetForward
from eyas.engine.graphs import Recording, StaticRows, Step, StepGraphs, lay


@dataclass(frozen=True)
class _Plan:
    """A verify forward as numbers: the shape of its step, and what is copied into it."""

    rows: int
    length: int
    paths: int
    """Of a tree, a power of two; 0 of a chain."""
    values: list[int]
    """Ids, positions and first slot, then of a tree the paths [P, D] and what is taken of each [P, R]."""
    other: list[int]
    """Other numbers of the same shape, to be recorded on: they write into slots that `values` or later rows do."""

    @property
    def key(self) -> tuple[str, int, int, int]:
        return "verify", self.rows, self.length, self.paths


class GraphedForward(TargetForward):
    """TargetForward, and graphs once `use_graphs` has been told how to record."""

    graphs: StepGraphs | None = None

    def use_graphs(self, recording: Recording) -> StepGraphs:
        """Record steps from now on, over a cache of `recording.room` rows, or of the context where that is less."""
        self.cache.reserve(min(recording.room, self.target.context_length + (self.rows or 1)))
        self.graphs = StepGraphs(self.cache, recording, "target")
        self._kept: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        return self.graphs

    def close(self) -> None:
        """Forget the graphs before the modules that they were recorded from are given back."""
        if self.graphs is not None:
            self.graphs.drop()
            self.graphs = None
        super().close()

    def verify(self, ids: Sequence[int], start: int, parents: Sequence[int] | None = None) -> Tensor:
        graphs = self.graphs
        plan = None
        if graphs is not None and graphs.usable(self.cache):
            plan = self._planned(ids, start, branching(parents))
        if graphs is None or plan is None:
            return super().verify(ids, start, parents)
        if plan.key not in graphs.steps:
            normed = super().verify(ids, start, parents)
            eager = [normed, *(self._states[boundary] for boundary in self.boundaries)]
            step, expected = self._verify_step(plan, eager), [states[:, : len(ids)] for states in eager]
            if not graphs.add(plan.key, step, [self._integers(plan.other)], [self._integers(plan.values)], expected):
                return super().verify(ids, start, parents)
        normed, *states = graphs.steps[plan.key]([self._integers(plan.values)])
        self._states = dict(zip(self.boundaries, states, strict=True))
        self.cache.start, self.cache.rows = start, plan.rows
        self.cache.tree = self._kept[plan.rows] if plan.paths else {}
        return normed

    def keep(self, path: Sequence[int]) -> None:
        graphs, cache = self.graphs, self.cache
        if graphs is None or not graphs.usable(cache) or cache.tree is not self._kept.get(cache.rows):
            super().keep(path)
            return
        # Slots behind the path are written before they are read again: what they get here does not matter.
        padded, key = [*path, *[path[-1]] * (cache.rows - len(path))], ("keep", cache.rows)
        values = [self._integers([cache.start, *padded])]
        if key in graphs.steps:
            graphs.steps[key](values)
            return
        super().keep(padded)
        expected = self._cached_rows()
        other = [self._integers([cache.start, *(cache.rows - 1 - row for row in padded)])]
        if not graphs.add(key, self._keep_step(cache.rows), other, values, expected, self._cached_rows):
            super().keep(padded)

    def _planned(self, ids: Sequence[int], start: int, tree: Sequence[int] | None) -> _Plan | None:
        """None where rows attend over two lengths."""
        cache, last = self.cache, start + (max(depths(tree)) if tree else len(ids) - 1)
        length = attended_length(start, cache.block)
        padded, positions = self._bucket(ids, start, tree)
        rows = len(padded)
        if attended_length(last, cache.block) != length or start + rows > cache.capacity:
            return None
        shift = int(attended_length(last + 1, cache.block) == length and start + rows < cache.capacity)
        paths, taken = _paths(tree, rows) if tree else ([], [])
        values = [*padded, *positions, start, *paths, *taken]
        other = [
            *((token + 1) % self.target.vocab_size for token in padded),
            *(position + shift for position in positions),
            start + shift,
            *(rows - 1 - row for row in paths),
            *(1 - mine for mine in taken),
        ]
        return _Plan(rows, length, len(paths) // rows, values, other)

    def _verify_step(self, plan: _Plan, like: Sequence[Tensor]) -> Step:
        """`like`: what the eager forward of this shape gave."""
        rows, device, last = plan.rows, self.cache.device, self.target.context_length - 1
        inputs = torch.zeros(len(plan.values), dtype=torch.int64, device=device)
        ids_R, positions_R, start, *laid = inputs.split([rows, rows, 1, *[plan.paths * rows] * 2])
        paths_PD, taken_PR = (part.view(-1, rows) for part in laid) if plan.paths else (None, None)
        outputs = [torch.empty_like(states) for states in like]
        if plan.paths and rows not in self._kept:
            made = partial(torch.empty_like, dtype=self.cache.dtype)
            self._kept[rows] = {layer: (made(key), made(value)) for layer, (key, value) in self.cache.tree.items()}
        kept = self._kept[rows] if plan.paths else {}

        def run() -> None:
            running = StaticRows(
                cache=self.cache,
                length=plan.length,
                visible_RL=torch.arange(plan.length, device=device)[None] <= positions_R[:, None],
                positions_R1=positions_R[:, None],
                slots_D=start + torch.arange(rows, device=device),
                paths_PD=paths_PD,
                taken_PR=None if taken_PR is None else taken_PR.bool(),
                kept=kept,
            )
            placed = positions_R.clamp(max=last)
            given = {"attention_mask": self._no_mask, "use_cache": False}
            normed = self._call(ids_R[None], placed[None], running, **given).last_hidden_state
            states = [normed, *(self._states[boundary] for boundary in self.boundaries)]
            for place, computed in zip(outputs, states, strict=True):
                place.copy_(computed)

        return Step([inputs], outputs, run)

    def _keep_step(self, rows: int) -> Step:
        inputs = torch.zeros(1 + rows, dtype=torch.int64, device=self.cache.device)
        start, path_D = inputs.split([1, rows])

        def run() -> None:
            slots_D = start + torch.arange(rows, device=self.cache.device)
            for layer, states in self._kept[rows].items():
                buffers = self.cache.keys[layer], self.cache.values[layer]
                lay(buffers, slots_D, [rows_of.index_select(2, path_D) for rows_of in states])

        return Step([inputs], [], run)

    def _cached_rows(self) -> list[Tensor]:
        """Copies of the cache's rows that the latest forward's stand in, [1, rows, K, E] by layer."""
        cache, rows = self.cache, slice(self.cache.start, self.cache.start + self.cache.rows)
        buffers = [*cache.keys.values(), *cache.values.values()]
        return [buffer[:, :, rows].transpose(1, 2).clone() for buffer in buffers]

    def _integers(self, values: Sequence[int]) -> Tensor:
        """On the host: a copy into a step's inputs brings them over."""
        return torch.tensor(values)


def _paths(tree: Sequence[int], rows: int) -> tuple[list[int], list[int]]:
    """Every path of a tree filled up to `rows` rows, and 1 for each of the `rows` rows that is taken of it, one path
    after the other; both filled up to a power of two with a path of which nothing is taken."""
    laid, taken, done = list[int](), list[int](), set[int]()
    found = leaf_paths(tree)
    for path in found:
        laid += [*path, *[path[-1]] * (rows - len(path))]
        taken += [int(row in path and row not in done) for row in range(rows)]
        done |= set(path)
    missing = 2 ** (len(found) - 1).bit_length() - len(found)
    return laid + laid[:rows] * missing, taken + [0] * rows * missing
