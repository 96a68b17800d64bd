"""Does the stored last hidden state teach the target's own next tokens, under the norm state it is declared in?

Four trainers shipped the same bug (an un-normed or twice-normed teacher): training converges normally and acceptance
falls by 6 to 33 % (training.md 0, fact 3). It is seen here before a draft is trained on it.

Shapes: T tokens, H hidden size.
"""

import torch
from torch import Tensor

from eyas.data.shards import NormState
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
