"""Which boundary a block of hidden states is: measured against the reference, never read off a list.

Raw cosine is a poor measure here: a few channels reach tens of thousands and neighbouring boundaries look alike. A
boundary's score is the distance to it in units of what its layer changes, the median over tokens of
|x - h_b| / min(|h_(b+1) - h_b|, |h_b|); the second term counts for embeddings, which a first layer may drown. On the
default target the right boundary scores at most 0.10 under bf16 or fp8 states or int8 weights, 0.15 under the last two
together, and the nearest wrong one at least 0.46; so a match is a score under 0.2 and less than half the second best,
else the answer is unknown. Every boundary is tried at every token shift.

Shapes: T tokens, H hidden size, A = len(taps) * H.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MATCH_BELOW = 0.2
SECOND_BEST_RATIO = 0.5
SKIP_FIRST = 4
SINK_FACTOR = 10.0
"""A token whose norm exceeds this many medians is an attention sink: its few huge channels would decide alone."""
FEWEST_ROWS = 8
"""A median over fewer tokens than these is no evidence."""
SHIFTS = (0, 1, -1, 2, -2)
"""Row t of a block may be the reference's row t + shift: a pipeline that dropped or added a token somewhere."""
NORMED = -1
"""Stands for `final_norm(boundary n)` among the candidates."""


@dataclass(frozen=True)
class Match:
    """What one block turned out to be."""

    boundary: int | None
    """The boundary; NORMED for the last one after the final norm; None when nothing matches clearly."""
    score: float
    second: int
    second_score: float
    shift: int = 0
    """Row t of the block is the reference's row t + shift."""
    scores: dict[int, float] = field(default_factory=dict, repr=False)
    """The best score of every boundary (and NORMED) over the shifts: a row of the heat map."""

    @property
    def known(self) -> bool:
        return self.boundary is not None

    @property
    def normed(self) -> bool:
        """Whether the block is after the final norm."""
        return self.boundary == NORMED

    @property
    def margin(self) -> float:
        """How many times further the next candidate is: a match has at least 2."""
        return self.second_score / max(self.score, 1e-12)

    @property
    def as_dict(self) -> dict[str, Any]:
        """For programs; `boundary` is null where unknown. Boundaries as in `key_of`, scores that are none as null."""
        return {
            "boundary": None if self.boundary is None else key_of(self.boundary),
            "shift": self.shift,
            "score": finite(self.score),
            "second": key_of(self.second),
            "second_score": finite(self.second_score),
            "scores": {key_of(boundary): finite(score) for boundary, score in self.scores.items()},
        }

    def words(self) -> str:
        best = "unknown" if self.boundary is None else name_of(self.boundary) + shifted(self.shift)
        return f"{best} (score {self.score:.3f}, next {name_of(self.second)} at {self.second_score:.3f})"


def key_of(boundary: int) -> str:
    """A boundary as a JSON key; `normed` is the last state after the final norm."""
    return "normed" if boundary == NORMED else str(boundary)


def finite(score: float) -> float | None:
    return round(score, 4) if math.isfinite(score) else None


def name_of(boundary: int) -> str:
    return "the final-normed last state" if boundary == NORMED else f"boundary {boundary}"


def shifted(shift: int) -> str:
    """A shift in words, to follow a name; nothing for no shift."""
    if shift == 0:
        return ""
    count = "one token" if abs(shift) == 1 else f"{abs(shift)} tokens"
    return f", {count} {'later' if shift > 0 else 'earlier'} than its row"


def usable_rows(states_TH: Tensor) -> Tensor:
    """Mask [T] of the tokens to score: finite, not the first few, not attention sinks."""
    norms = states_TH.float().norm(dim=-1)
    finite = norms.isfinite()
    keep = finite & (norms < SINK_FACTOR * norms[finite].nanmedian())
    keep[: min(SKIP_FIRST, len(keep) - 1)] = False
    return keep


@dataclass(frozen=True)
class Reference:
    """The candidates: boundaries 0.. of [T, H] in float32, the unit of each one's score, and the rows worth scoring."""

    states: list[Tensor]
    normed_TH: Tensor | None
    units: list[Tensor]
    """min(|h_(b+1) - h_b|, |h_b|) [T]; the last boundary's change is the one before it."""
    rows: Tensor

    @classmethod
    def of(cls, states: Sequence[Tensor], normed_TH: Tensor | None) -> "Reference":
        """`normed_TH` is the last boundary through the final norm; None where the reference stops below it."""
        assert len(states) > 1, "two boundaries at least: the unit is what a layer changes"
        floats = [state.float() for state in states]
        changes = [(after - before).norm(dim=-1) for before, after in pairwise(floats)]
        changes.append(changes[-1])
        units = [torch.minimum(change, state.norm(dim=-1)) for change, state in zip(changes, floats, strict=True)]
        rows = torch.stack([usable_rows(state) for state in floats]).all(dim=0)
        return cls(floats, None if normed_TH is None else normed_TH.float(), units, rows)

    def candidates(self) -> list[tuple[int, Tensor, Tensor]]:
        """Boundary, its states [T, H], and the unit of its score [T]."""
        found = [(b, state, unit) for b, (state, unit) in enumerate(zip(self.states, self.units, strict=True))]
        if self.normed_TH is not None:
            found.append((NORMED, self.normed_TH, self.normed_TH.norm(dim=-1)))
        return found


def identify(
    block_TH: Tensor, reference: Sequence[Tensor], normed_TH: Tensor | None, shifts: Sequence[int] = SHIFTS
) -> Match:
    """Compare one captured block [T, H] with every reference boundary ([T, H] each) and the final-normed state.

    The answer is unknown where no candidate is clearly nearer than every other, or too few tokens can be scored.
    """
    return identify_in(block_TH, Reference.of(reference, normed_TH), shifts)


def identify_taps(taps_TA: Tensor, reference: Sequence[Tensor], normed_TH: Tensor | None) -> list[Match]:
    """Each block of concatenated taps, in the order they lie in `taps_TA` [T, A]."""
    whole = Reference.of(reference, normed_TH)
    return [identify_in(block_TH, whole) for block_TH in taps_TA.split(whole.states[0].shape[-1], dim=-1)]


def identify_in(block_TH: Tensor, reference: Reference, shifts: Sequence[int] = SHIFTS) -> Match:
    """`identify` against a prepared reference."""
    assert block_TH.shape == reference.states[0].shape, f"a block of {tuple(block_TH.shape)}"
    block_TH = block_TH.float()
    finite_T = block_TH.isfinite().all(dim=-1)
    scores: dict[tuple[int, int], float] = {}
    for shift in shifts:
        mine, theirs = aligned(len(block_TH), shift)
        rows = reference.rows[theirs] & finite_T[mine]
        if int(rows.sum()) < min(FEWEST_ROWS, len(block_TH) // 2):
            continue
        x_TH = block_TH[mine][rows]
        for boundary, state_TH, unit_T in reference.candidates():
            scores[boundary, shift] = relative_distance(x_TH, state_TH[theirs][rows], unit_T[theirs][rows])
    return decide(scores)


def aligned(length: int, shift: int) -> tuple[slice, slice]:
    """Rows of a block, and the reference's rows they would be, where block row t is reference row t + shift."""
    return slice(max(0, -shift), length - max(0, shift)), slice(max(0, shift), length - max(0, -shift))


def decide(scores: dict[tuple[int, int], float]) -> Match:
    """The nearest (boundary, shift), if it is near and alone; else unknown."""
    ranked = sorted(scores.items(), key=lambda item: item[1])
    if len(ranked) < 2:
        return Match(None, float("inf"), 0, float("inf"))
    ((best, shift), score), ((second, _), second_score) = ranked[:2]
    clear = score < MATCH_BELOW and score < SECOND_BEST_RATIO * second_score
    nearest = {b: min(s for (other, _), s in scores.items() if other == b) for b, _ in scores}
    return Match(best if clear else None, score, second, second_score, shift if clear else 0, nearest)


def relative_distance(x_TH: Tensor, state_TH: Tensor, unit_T: Tensor) -> float:
    """Median over tokens of |x - state| / unit."""
    return ((x_TH - state_TH).norm(dim=-1) / unit_T.clamp_min(1e-12)).median().item()


def reordered(matches: Sequence[Match], declared: Sequence[int]) -> bool:
    """Whether the blocks are the declared boundaries, all known, in another order."""
    found = [match.boundary for match in matches if match.boundary is not None]
    return found != list(declared) and sorted(found) == sorted(declared)


def block_facts(blocks: Sequence[tuple[int | None, Match]]) -> list[dict[str, Any]]:
    """For programs: what each block was declared to be, what it is, and its score at every boundary."""
    return [{"declared": boundary, **match.as_dict} for boundary, match in blocks]
