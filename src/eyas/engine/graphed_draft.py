"""The draft's forward through its own modules, its rounds' steps recorded (engine/graphs.py): one for each number of
rows and attended length. A prompt's rows are eager, and so is the head.

Shapes: R rows, H hidden, D ancestors, L attended length.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from eyas.engine.cache import LENGTH_BLOCK, attended_length, depths, path_to
from eyas.engine.draft_forward import DraftForward, NativeDraft, PlainDraft, draft_forward
from eyas.engine.forward import Forward
from eyas.engine.graphs import Recording, StaticRows, Step, StepGraphs
from eyas.models.draft import Draft


class GraphedDraft(PlainDraft):
    """PlainDraft; what it gives is the caller's to keep. A fork, which has a cache of its own, is a PlainDraft."""

    def __init__(self, draft: Draft, recording: Recording, *, int8: bool = False) -> None:
        super().__init__(draft, int8=int8)
        # A length block more than the target's, for the rows of a growing tree.
        self.cache.reserve(min(recording.room, draft.config.max_position_embeddings) + LENGTH_BLOCK)
        self.graphs = StepGraphs(self.cache, recording, "draft")
        self._most = 1

    def settle(self, most: int, kernels: str) -> list[nn.Linear]:
        self._most = most
        return super().settle(most, kernels)

    def chain(self, state_1RH: Tensor, ids: Sequence[int], start: int, last: int = 1) -> Tensor:
        if len(ids) > self._most:  # a prompt, of which only the last layer's last row is computed whole
            return super().chain(state_1RH, ids, start, last)
        positions = [start + row for row in range(len(ids))]
        ancestors = [list(range(row + 1)) for row in range(len(ids))]
        eager = partial(super().chain, state_1RH, ids, start, last=len(ids))
        return self._replayed(eager, state_1RH, ids, start, start, positions, ancestors)[:, -last:]

    def tree(self, state_1RH: Tensor, ids: Sequence[int], start: int, parents: Sequence[int]) -> Tensor:
        first = len(parents) - len(ids)
        positions = [start + depth for depth in depths(parents)[first:]]
        ancestors = [path_to(row, parents) for row in range(first, len(parents))]
        eager = partial(super().tree, state_1RH, ids, start, parents)
        return self._replayed(eager, state_1RH, ids, start, start + first, positions, ancestors)

    def _replayed(
        self,
        eager: Callable[[], Tensor],
        state_1RH: Tensor,
        ids: Sequence[int],
        base: int,
        first: int,
        positions: Sequence[int],
        ancestors: Sequence[Sequence[int]],
    ) -> Tensor:
        """h [1, R, H] of rows in slots first..., at `positions`, that see the slots below `base` and, from there on,
        `ancestors`, each its own place last."""
        rows, end, most = len(ids), first + len(ids) - 1, self._most
        if not self.graphs.usable(self.cache) or max(rows, *map(len, ancestors)) > most or end >= self.cache.capacity:
            return eager()
        length = attended_length(end, self.cache.block)
        seen = [place for path in ancestors for place in [*path, *[path[-1]] * (most - len(path))]]
        values = [torch.tensor([*ids, *positions, base, first, *seen]), state_1RH]
        key = rows, length
        if key not in self.graphs.steps:
            shift, vocabulary = int(end + 1 < length), self.draft.config.vocab_size
            moved = [*((token + 1) % vocabulary for token in ids), *(position + shift for position in positions)]
            other = [torch.tensor([*moved, base, first + shift, *(place + shift for place in seen)]), -state_1RH]
            if not self.graphs.add(key, self._step(rows, length, state_1RH), other, values, [eager()]):
                return eager()
        self.positions = list(positions)
        return self.graphs.steps[key](values)[0]

    def _step(self, rows: int, length: int, like_1RH: Tensor) -> Step:
        device, most = self.cache.device, self._most
        inputs = torch.zeros(2 * rows + 2 + rows * most, dtype=torch.int64, device=device)
        ids_R, positions_R, base, first, seen = inputs.split([rows, rows, 1, 1, rows * most])
        state_1RH, hidden_1RH = torch.empty_like(like_1RH), torch.empty_like(like_1RH)
        window = self.draft.config.sliding_window

        def run() -> None:
            below_1L = torch.arange(length, device=device)[None] < base
            running = StaticRows(
                cache=self.cache,
                length=length,
                visible_RL=below_1L.repeat(rows, 1).scatter_(1, base + seen.view(rows, most), True),
                positions_R1=positions_R[:, None],
                slots_D=first + torch.arange(rows, device=device),
            )

            def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                return running.attend(layer, query, key, value, window=window)

            hidden_1RH.copy_(self.draft(ids_R[None], state_1RH, self.draft.rope(positions_R[None]), attend))

        return Step([inputs, state_1RH], [hidden_1RH], run)


def draft_runner(draft: Draft, forward: Forward, int8: bool, recording: Recording | None) -> DraftForward:
    """draft_forward's choice, whose steps are recorded where that is asked for and it runs the draft's own modules."""
    runner = draft_forward(draft, forward, int8)
    return runner if recording is None or isinstance(runner, NativeDraft) else GraphedDraft(draft, recording, int8=int8)
