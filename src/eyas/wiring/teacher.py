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

AGREES = 0.98
"""Share of equal argmaxes that counts as the target's own: bf16 states flip near-ties."""


@torch.inference_mode()
def teacher_agreement(target: Target, last_hidden_TH: Tensor, reference_TH: Tensor) -> dict[str, float]:
    """Share of rows whose argmax equals the reference's, reading the states as `before`, `after` and `normed twice`.

    `reference_TH` is boundary n from the reference run over the same tokens.
    """
    stored = last_hidden_TH.to(target.dtype)
    once = target.final_norm(stored)
    wanted = target.logits(target.final_norm(reference_TH.to(target.dtype))).argmax(dim=-1)
    readings = {"before": once, "after": stored, "normed twice": target.final_norm(once)}
    return {name: (target.logits(x).argmax(dim=-1) == wanted).float().mean().item() for name, x in readings.items()}


@torch.inference_mode()
def agreeing_shift(target: Target, last_hidden_TH: Tensor, reference_TH: Tensor, state: NormState) -> int | None:
    """The token shift under which the stored states, of a norm `state`, are the target's; None where there is none.

    Row t of the stored states is then the reference's row t + shift.
    """
    for shift in SHIFTS[1:]:
        mine, theirs = aligned(len(last_hidden_TH), shift)
        if teacher_agreement(target, last_hidden_TH[mine], reference_TH[theirs])[state] >= AGREES:
            return shift
    return None


def norm_state(agreement: dict[str, float], declared: NormState) -> NormState | None:
    """The norm state the numbers show: the declared one if it agrees, else the one that does, else None."""
    other: NormState = "after" if declared == "before" else "before"
    for state in (declared, other):
        if agreement[state] >= AGREES:
            return state
    return None
