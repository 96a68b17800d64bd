"""P-EAGLE's forward in training: every step of every chain at once.

At step s >= 1 row t is fed placeholders for token and state, at rotary position t + s, and sees what it sees in TTT
(attention.py): the step-0 keys 0..t of its document and its own keys of steps 1..s. Nothing it is fed was drafted, so
all steps are one forward. Source: P-EAGLE (arXiv 2602.01469) as speculators 0.9.0 models/peagle/{core,attention}.py
has it; their sampling of rows, which saves memory, is left out: every supervised row is trained at every step.

Shapes: B batch (1), T packed rows, A width of the taps, H hidden, R[s] rows supervised at step s, M their sum over the
steps after 0, N query heads, K key heads, E width of a query and a key, U width of a value, Q queried rows.
"""

import torch
from torch import Tensor

from eyas.models.draft import ParallelDraft
from eyas.training.attention import TTTAttention
from eyas.training.rows import Rows


def unroll_parallel(draft: ParallelDraft, taps_TA: Tensor, ids_T: Tensor, rows: Rows, pace: int) -> list[Tensor]:
    """h of the supervised rows at every step, [R[s], H], before the norm."""
    total, later = len(taps_TA), rows.index[1:]
    masks = sum(map(len, later))
    # What follows a document's last row is never attended to. A single document's ids may go on beyond its taps.
    following_T = torch.cat([ids_T[1:], ids_T[-1:]])[:total]
    ids = torch.cat([following_T, ids_T.new_full((masks,), draft.mask_token_id)])
    state = torch.cat([draft.fuse(taps_TA[None]), draft.mask_state().expand(1, masks, -1)], dim=1)
    moved = [rows.positions_T[index] + step * pace for step, index in enumerate(later, start=1)]
    rope = draft.rope(torch.cat([rows.positions_T, *moved])[None])
    wanted = torch.cat([rows.index[0], torch.arange(total, total + masks, device=ids_T.device)])
    attention = ParallelAttention(rows, draft.config.sliding_window)
    hidden = draft(ids[None], state, rope, attention, rows=wanted)
    return list(hidden[0].split([len(index) for index in rows.index]))


class ParallelAttention:
    """The draft's `Attend` hook over rows of all steps, one step after another."""

    def __init__(self, rows: Rows, window: int | None) -> None:
        self.rows, self.window = rows, window
        self.later = [len(index) for index in rows.index[1:]]

    def __call__(self, layer: int, query_BNQE: Tensor, key_BKQE: Tensor, value_BKQU: Tensor) -> Tensor:
        """Context [B, N, Q, U]. Keys and values are of the T rows and of all later steps'; queries of step 0 may be
        fewer than T."""
        attention = TTTAttention(self.rows, self.window)
        parts = [self._steps(states) for states in (query_BNQE, key_BKQE, value_BKQU)]
        contexts = []
        for step, (query, key, value) in enumerate(zip(*parts, strict=True)):
            attention.begin(step)
            contexts.append(attention(layer, query, key, value))
        return torch.cat(contexts, dim=2)

    def _steps(self, states: Tensor) -> tuple[Tensor, ...]:
        return states.split([states.shape[2] - sum(self.later), *self.later], dim=2)
