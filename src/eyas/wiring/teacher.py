"""Does the stored last hidden state teach the target's own next tokens, under the norm state it is declared in?

Four trainers shipped the same bug (an un-normed or twice-normed teacher): training converges normally and acceptance
falls by 6 to 33 % (training.md 0, fact 3). It is seen here before a draft is trained on it.

Shapes: T tokens, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.data.shards import NormState, Sample
from eyas.models.streaming.ends import Ends
from eyas.models.target import Target
from eyas.wiring.identify import SHIFTS, aligned

NEAR = 0.1
"""Nats a token from the target's own distribution that stored states may be: on the default target bf16 states
are 0.00003 off, fp8 ones 0.008, a norm too few or too many 2 to 380."""
AS_NEAR, NOTHING = 4.0, 0.005
"""A reading is as good as the nearest one within this factor, or where a norm more changes next to nothing."""


@torch.inference_mode()
def teacher_divergence(target: Target, last_hidden_TH: Tensor, reference_TH: Tensor) -> dict[str, float]:
    """Mean nats from the reference's next-token distributions, the states read as `before`, `after`, `normed twice`.

    `reference_TH` is boundary n from the reference run over the same tokens. Argmaxes alone would not do: one more norm
    leaves most of them, and rounded states flip near-ties.
    """
    stored = last_hidden_TH.to(target.dtype)
    once = target.final_norm(stored)
    wanted = target.logits(target.final_norm(reference_TH.to(target.dtype))).float().log_softmax(dim=-1)
    readings = {"before": once, "after": stored, "normed twice": target.final_norm(once)}
    return {name: divergence(wanted, target.logits(x).float().log_softmax(dim=-1)) for name, x in readings.items()}


def divergence(wanted_TV: Tensor, got_TV: Tensor) -> float:
    """Mean Kullback-Leibler divergence of log-probabilities [T, V] from the wanted ones."""
    return (wanted_TV.exp() * (wanted_TV - got_TV)).sum(dim=-1).mean().item()


@torch.inference_mode()
def agreeing_shift(target: Target, last_hidden_TH: Tensor, reference_TH: Tensor, state: NormState) -> int | None:
    """The token shift under which the stored states, of a norm `state`, are the target's; None where there is none.

    Row t of the stored states is then the reference's row t + shift.
    """
    for shift in SHIFTS[1:]:
        mine, theirs = aligned(len(last_hidden_TH), shift)
        if teacher_divergence(target, last_hidden_TH[mine], reference_TH[theirs])[state] <= NEAR:
            return shift
    return None


def norm_state(divergences: dict[str, float], declared: NormState) -> NormState | None:
    """The norm state the numbers show: the declared one if none is clearly nearer; None where none is near."""
    other: NormState = "after" if declared == "before" else "before"
    nearest = min(declared, other, key=lambda state: divergences[state])
    if divergences[nearest] > NEAR:
        return None
    return declared if divergences[declared] <= AS_NEAR * divergences[nearest] + NOTHING else nearest


# A streamed target --------------------------------------------------------------------------------------------------

AGREED = 0.9
"""Share of a greedy answer's tokens that are the stored states' argmax: half precision turns a near tie at times."""
APART, LIKELY = 1.0, 3.0
"""Of a sampled answer: nats by which another reading must be likelier, and under which a text is the target's own."""


@torch.inference_mode()
def next_token_nats(ends: Ends, samples: Sequence[Sample]) -> tuple[dict[str, float] | None, dict[str, float]]:
    """Mean nats of the answers' tokens under the stored states read as `before`, `after` and `normed twice`, and the
    share of them that is the argmax. (None, {}) where no sample holds a token of an answer.

    The target said these tokens itself, so its own distribution finds them likely.
    """
    rows = [sample.loss_mask_T[1:].bool().nonzero()[:, 0] for sample in samples]
    stored = torch.cat([sample.last_hidden_TH[at] for sample, at in zip(samples, rows, strict=True)]).float()
    following = torch.cat([sample.ids_T[at + 1] for sample, at in zip(samples, rows, strict=True)]).to(torch.int64)
    if not len(following):
        return None, {}
    once = ends.final_norm(stored)
    totals, agreed = {}, {}
    for reading, states in {"before": once, "after": stored, "normed twice": ends.final_norm(once)}.items():
        logs_T, argmax_T = ends.log_probabilities(states, following)
        totals[reading] = -logs_T.mean().item()
        agreed[reading] = (argmax_T == following).float().mean().item()
    return totals, agreed


def reading_shown(
    totals: dict[str, float], agreed: dict[str, float], declared: NormState, greedy: bool
) -> tuple[str | None, bool]:
    """(the reading that the answers show, whether they show any). None: none of those tried; not shown: a text that is
    not the target's own tells nothing."""
    if greedy:
        best = declared if agreed[declared] >= AGREED else max(agreed, key=lambda reading: agreed[reading])
        return (best if agreed[best] >= AGREED else None), True
    best = min(totals, key=lambda reading: totals[reading])
    likely = totals[best] < LIKELY
    return (declared, likely) if best == declared else (best, likely and totals[declared] - totals[best] > APART)
