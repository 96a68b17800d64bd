"""Which boundary a block of hidden states is: measured against the reference, never read off a list.

Raw cosine is a poor measure here: a few channels reach tens of thousands and neighbouring boundaries look alike. A
boundary's score is the distance to it in units of what its layer changes, the median over tokens of
|x - h_b| / |h_(b+1) - h_b|. On the default target the right boundary scores at most 0.10 under bf16 and the nearest
wrong one at least 0.37, so a match is a score under 0.2 and less than half the second best; else the answer is unknown.

Shapes: T tokens, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MATCH_BELOW = 0.2
SECOND_BEST_RATIO = 0.5
SKIP_FIRST = 4
SINK_FACTOR = 10.0
"""A token whose norm exceeds this many medians is an attention sink: its few huge channels would decide alone."""
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

    @property
    def known(self) -> bool:
        return self.boundary is not None

    def words(self) -> str:
        best = "unknown" if self.boundary is None else name_of(self.boundary)
        return f"{best} (score {self.score:.3f}, next {name_of(self.second)} at {self.second_score:.3f})"


def name_of(boundary: int) -> str:
    return "the final-normed last state" if boundary == NORMED else f"boundary {boundary}"


def usable_rows(states_TH: Tensor) -> Tensor:
    """Mask [T] of the tokens to score: not the first few, not attention sinks."""
    norms = states_TH.float().norm(dim=-1)
    keep = norms < SINK_FACTOR * norms.median()
    keep[: min(SKIP_FIRST, len(keep) - 1)] = False
    return keep


def identify(block_TH: Tensor, reference: list[Tensor], normed_TH: Tensor) -> Match:
    """Compare one captured block [T, H] with every reference boundary (n + 1 of [T, H]) and the final-normed state."""
    block_TH = block_TH.float()
    rows = torch.stack([usable_rows(state) for state in reference]).all(dim=0)
    scores: dict[int, float] = {}
    for boundary, state in enumerate(reference):
        other = reference[boundary + 1] if boundary + 1 < len(reference) else reference[boundary - 1]
        scores[boundary] = relative_distance(block_TH[rows], state[rows], (other - state)[rows])
    scores[NORMED] = relative_distance(block_TH[rows], normed_TH[rows], normed_TH[rows])
    (best, score), (second, second_score) = sorted(scores.items(), key=lambda item: item[1])[:2]
    clear = score < MATCH_BELOW and score < SECOND_BEST_RATIO * second_score
    return Match(best if clear else None, score, second, second_score)


def relative_distance(x_TH: Tensor, state_TH: Tensor, change_TH: Tensor) -> float:
    """Median over tokens of |x - state| / |change|."""
    distance = (x_TH - state_TH).norm(dim=-1)
    return (distance / change_TH.norm(dim=-1).clamp_min(1e-12)).median().item()
