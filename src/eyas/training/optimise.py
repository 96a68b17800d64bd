"""How weights move: AdamW, or Muon for the matrices inside the draft with AdamW for the rest; the learning rate."""

import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from eyas.models.draft import Draft
from eyas.recipe import TrainSettings

OUTSIDE = ("lm_head.weight", "embed_tokens.weight")
"""Matrices that face tokens, one row each: no linear map between states, so none of Muon's."""


class Optimiser:
    """One or two of torch's optimisers that share the draft's parameters, stepped as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(part.param_groups for part in self.parts))

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def kept(self, parameter: Tensor) -> tuple[str, ...]:
        """The names of what is kept of this parameter from step to step: a checkpoint holds it, a resume wants it."""
        muon = isinstance(self.owner(parameter), torch.optim.Muon)
        return ("momentum_buffer",) if muon else ("step", "exp_avg", "exp_avg_sq")

    def owner(self, parameter: Tensor) -> torch.optim.Optimizer:
        """The one that moves this parameter."""
        return next(
            part
            for part in self.parts
            if any(parameter is one for group in part.param_groups for one in group["params"])
        )


def trained(draft: Draft) -> dict[str, Tensor]:
    """The parameters that training moves, by name."""
    return {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}


def make_optimiser(draft: Draft, settings: TrainSettings) -> Optimiser:
    """Decay on matrices only. `fused`: one pass over the parameters in place of one a tensor and operation.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`), so that one learning rate serves both.
    """
    named = trained(draft)
    inside = [name for name, parameter in named.items() if parameter.dim() == 2 and name not in OUTSIDE]
    inner = inside if settings.optimiser == "muon" else []
    rest = [parameter for name, parameter in named.items() if name not in inner]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)
    if not inner:
        return Optimiser([adamw])
    muon = torch.optim.Muon(
        [named[name] for name in inner],
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return Optimiser([muon, adamw])


def learning_rate(step: int, steps: int, settings: TrainSettings) -> float:
    """Linear warm-up over `warmup` of the steps, then a cosine down to `final_learning_rate` of the peak."""
    warm = max(1, round(settings.warmup * steps))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    floor = settings.final_learning_rate
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
