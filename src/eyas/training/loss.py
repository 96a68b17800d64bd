"""The TTT loss: the draft unrolled over captured rows, against the teacher at every step.

An objective (objectives.py) over the draft vocabulary; step s weighs step_decay ** s. A row whose teacher's
full-vocabulary argmax is outside the draft vocabulary is left out of the loss and counts as a miss in the accuracy.

Shapes: T packed rows, A width of the taps, H hidden, R[s] rows supervised at step s, C rows in the loss of all steps,
P teacher rows, D draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eyas.formats.methods import MethodName
from eyas.models.draft import Draft
from eyas.models.fused import Doubled, taken
from eyas.training.attention import TTTAttention
from eyas.training.chains import chains_of
from eyas.training.chunked import ChunkedLoss, chunk_rows
from eyas.training.objectives import SOFT_CROSS_ENTROPY, Objective
from eyas.training.parallel import unroll_parallel
from eyas.training.rows import Rows
from eyas.training.teacher import Teacher


@dataclass(frozen=True)
class Batch:
    """Documents packed one after another, on one device."""

    samples: tuple[str, ...]
    """Their ids, for messages."""
    ids_T: Tensor
    taps_TA: Tensor
    last_hidden_TH: Tensor
    argmax_T: Tensor
    """The target's full-vocabulary argmax after each row; read at supervised rows only."""
    rows: Rows

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            samples=self.samples,
            ids_T=self.ids_T.to(device),
            taps_TA=self.taps_TA.to(device),
            last_hidden_TH=self.last_hidden_TH.to(device),
            argmax_T=self.argmax_T.to(device),
            rows=self.rows.to(device),
        )

    def with_bad_states(self) -> list[str]:
        """The samples whose taps or last hidden are not finite."""
        spans = zip(self.samples, self.rows.starts, self.rows.starts[1:], strict=False)
        states = (self.taps_TA, self.last_hidden_TH)
        return [
            name for name, first, last in spans if not all(bool(one[first:last].isfinite().all()) for one in states)
        ]


@dataclass(frozen=True)
class Sums:
    """Per-step sums over a batch, [S] float64: they add up over batches and processes."""

    loss: Tensor
    """The objective summed over the rows in the loss, unweighted."""
    hits: Tensor
    """Rows whose draft argmax is the target's."""
    kept: Tensor
    """Rows in the loss: supervised, and the teacher's argmax in the draft vocabulary."""
    rows: Tensor
    """Supervised rows."""

    @classmethod
    def none(cls, steps: int) -> "Sums":
        """Those of no row."""
        return cls(*torch.zeros(4, steps, dtype=torch.float64))

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.loss + other.loss, self.hits + other.hits, self.kept + other.kept, self.rows + other.rows)

    def mean_loss(self) -> list[float]:
        return (self.loss / self.kept.clamp(min=1)).tolist()

    def accuracy(self) -> list[float]:
        return (self.hits / self.rows.clamp(min=1)).tolist()


Unroll = Callable[[Any, Tensor, Tensor, Rows, int], list[Tensor]]
"""(draft, taps [T, A], ids [T], rows, pace) to h of the supervised rows at every step, [R[s], H], before the norm."""


def unroll(draft: Draft, taps_TA: Tensor, ids_T: Tensor, rows: Rows, pace: int = 1) -> list[Tensor]:
    """h of the supervised rows at every step, [R[s], H], before the norm, as the draft's method makes them.

    Prompt rows take part in step 0 with their keys and values only. `pace`: rotary positions that a step moves on; any
    but 1 is a wiring fault, unrolled to be told from the right one (wiring/hypotheses).
    """
    return UNROLLS[draft.config.method](draft, taps_TA, ids_T, rows, pace)


def unroll_steps(draft: Draft, taps_TA: Tensor, ids_T: Tensor, rows: Rows, pace: int) -> list[Tensor]:
    return unroll_some(draft, taps_TA, ids_T, rows, pace)[0]


def unroll_some(
    draft: Draft,
    taps_TA: Tensor,
    ids_T: Tensor,
    rows: Rows,
    pace: int = 1,
    going_on: Callable[[int, Tensor, Tensor], Tensor] | None = None,
) -> tuple[list[Tensor], Rows]:
    """One forward a step: true tokens, the draft's own states. Row t is fed at step s the token that row t + s is fed
    at step 0, so nothing of the tokens themselves is computed again. `going_on`(step, rows [R], h [R, H]) says which
    rows [R] later steps go on with; the rows that were unrolled are given back."""
    attention = TTTAttention(rows, draft.config.sliding_window)
    # What follows a document's last row is never attended to. A single document's ids may go on beyond its taps.
    following = torch.cat([ids_T[1:], ids_T[-1:]])
    met = torch.cat([index + step for step, index in enumerate(rows.index)]).unique()
    tokens = draft.tokens(following, met)
    state = draft.fuse(taps_TA[None])
    rope = draft.rope(rows.positions_T[None])
    hidden = draft.step(Doubled(tokens, None), state, rope, attention, rows=rows.index[0])
    unrolled = [hidden[0]]
    for step in range(1, rows.steps):
        if going_on is not None:
            before, kept = rows.index[step - 1], going_on(step - 1, rows.index[step - 1], hidden[0])
            attention.rows = rows = rows.only(step, torch.isin(rows.index[step], before[kept]))
        attention.begin(step)
        index = rows.index[step]
        state = taken(draft.feedback(hidden), rows.inside[step])
        rope = draft.rope(rows.positions_T[index][None] + step * pace)
        hidden = draft.step(Doubled(tokens, index + step), state, rope, attention)
        unrolled.append(hidden[0])
    return unrolled, rows


@torch.no_grad()
def drafts_its_text(draft: Draft, ids_T: Tensor, step: int, index_R: Tensor, hidden_RH: Tensor) -> Tensor:
    """Whether what each row drafts at `step` is the token that it is fed next [R]: only then is that its own, and,
    where answers are greedy, does a server draft the row's next step at all."""
    parts = hidden_RH.split(chunk_rows(draft.config.draft_vocab_size))
    drafted = [draft.target_ids(draft.logits(part).argmax(-1)) for part in parts]
    return torch.cat(drafted) == ids_T[index_R + 2 + step]


UNROLLS: dict[MethodName, Unroll] = {"eagle3": unroll_steps, "peagle": unroll_parallel}


def in_vocabulary(rows: Rows, argmax_T: Tensor, t2d: Tensor) -> list[Tensor]:
    """Per step which supervised rows [R[s]] are in the loss: the teacher's argmax can be said by the draft."""
    return [t2d[argmax_T[index + 1 + step]] for step, index in enumerate(rows.index)]


def ttt_loss(
    draft: Draft,
    batch: Batch,
    teacher: Teacher,
    draft_of_V: Tensor,
    row_weights: Sequence[float],
    dtype: torch.dtype = torch.float32,
    objective: Objective = SOFT_CROSS_ENTROPY,
    on_policy: bool = False,
) -> tuple[Tensor, Sums]:
    """The weighted loss (a scalar with a gradient) and its per-step sums; `on_policy`: over the rows that the draft's
    own tokens reach.

    `row_weights[s]` is what one row of step s weighs: step_decay ** s over the denominator. `draft_of_V` is the draft
    id of each target id (vocab.draft_ids). `dtype`: that of the matrix products.
    """
    rows = batch.rows
    device_type = batch.ids_T.device.type
    with torch.autocast(device_type, dtype=dtype, enabled=dtype != torch.float32):
        if on_policy:
            own = partial(drafts_its_text, draft, batch.ids_T)
            hidden, rows = unroll_some(draft, batch.taps_TA, batch.ids_T, rows, going_on=own)
        else:
            hidden = unroll(draft, batch.taps_TA, batch.ids_T, rows)
    kept = in_vocabulary(rows, batch.argmax_T, draft.t2d)
    teacher_rows_P = rows.index[0] + 1  # every step's teacher position is some step-0 row's
    with torch.no_grad():
        teacher_PD = teacher.probabilities(batch.last_hidden_TH[teacher_rows_P], dtype)
    at = [index[keep] + 1 + step for step, (index, keep) in enumerate(zip(rows.index, kept, strict=True))]
    normed_CH = draft.norm(torch.cat([states[keep] for states, keep in zip(hidden, kept, strict=True)]).float())
    at_C = torch.cat(at)
    counts = torch.tensor([len(positions) for positions in at])
    weight_C = torch.repeat_interleave(torch.tensor(row_weights, dtype=torch.float32), counts).to(normed_CH.device)
    step_of_C = torch.repeat_interleave(torch.arange(rows.steps), counts)
    chains = None
    if objective.coupled:
        order_C, chains = chains_of([index[keep] for index, keep in zip(rows.index, kept, strict=True)], rows.index[0])
        normed_CH, at_C, weight_C = normed_CH[order_C], at_C[order_C], weight_C[order_C]
        step_of_C = step_of_C[order_C.cpu()]
    truth_C = draft_of_V[batch.argmax_T[at_C]]
    where_C = torch.searchsorted(teacher_rows_P, at_C)
    loss, loss_C, hit_C = ChunkedLoss.apply(
        normed_CH, draft.lm_head.weight, teacher_PD, where_C, truth_C, weight_C, dtype, objective, chains
    )
    sums = Sums(
        loss=_per_step(step_of_C, loss_C, rows.steps),
        hits=_per_step(step_of_C, hit_C, rows.steps),
        kept=counts.double(),
        rows=torch.tensor([len(index) for index in rows.index], dtype=torch.float64),
    )
    return loss, sums


def _per_step(step_of_C: Tensor, values_C: Tensor, steps: int) -> Tensor:
    return torch.zeros(steps, dtype=torch.float64).index_add_(0, step_of_C, values_C.double().cpu())
