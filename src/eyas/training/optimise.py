"""How weights move: AdamW, or Muon for the matrices inside the draft with AdamW for the rest; the learning rate."""

import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from eyas.models.draft import Draft
from eyas.recipe import TrainSettings
from eyas.training.distributed import Ranks
from eyas.training.shards import local, sharded_as, whole_tensor

OUTSIDE = ("lm_head.weight", "embed_tokens.weight")
"""Matrices that face tokens, one row each: no linear map between states, so none of Muon's."""


QUINTICS = (
    (7.9903, -21.4146, 14.3983),
    (3.8710, -2.6172, 0.4487),
    (3.4240, -2.3359, 0.4219),
    (2.5239, -1.7244, 0.3660),
)
"""a, b, c of x -> a x + b x^3 + c x^5, one after another: each the nearest to 1 over all that the ones before may leave
of [0.003, 1] (greedy minimax, Amsel et al. 2025, "The Polar Express"), and over 5 % above it, for products round.
Together they take [0.003, 1.05] to [0.74, 1.26]. Muon's own (Keller Jordan, 2024) are one triple five times."""


class Muon(torch.optim.Muon):
    """torch's Muon with Nesterov's momentum, but the iteration is `orthogonal` (`ns_steps` and `ns_coefficients` mean
    nothing here), and on a CPU in the dtype of the other products. Torch fixes bfloat16: ten times as long as all the
    rest of a step where a CPU has no bfloat16 products, and a fifth of float32's time where it has (docs/lab.md).

    The iteration needs whole matrices, and is the same in each of several processes: they share it out, in rounds of
    one matrix each, and send one another what came out.
    """

    def __init__(
        self, params: list[Tensor], dtype: torch.dtype = torch.float32, ranks: Ranks | None = None, **settings: Any
    ) -> None:
        super().__init__(params, **settings)
        self.dtype, self.ranks = dtype, ranks or Ranks()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            moved = [weight for weight in group["params"] if weight.grad is not None]
            for weights in rounds(moved, self.ranks.size):
                self._move(weights, group)

    def _move(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """The first process takes the first of `weights`, the second the second. All gather before any computes: the
        others would wait for it."""
        mine: dict[int, Tensor] = {}
        for number, weight in enumerate(weights):
            whole = whole_tensor(self._direction(weight, group["momentum"]))
            if number == self.ranks.place.rank:
                mine[number] = whole
        for number, whole in mine.items():
            mine[number] = orthogonal(whole, self.dtype)
        # a rate that is beyond float32 leaves weights that are named, not a scalar that torch refuses
        rate = min(group["lr"], torch.finfo(torch.float32).max)
        for number, weight in enumerate(weights):
            update = mine.get(number)
            if update is None:
                update = torch.empty(weight.shape, dtype=products(weight, self.dtype), device=weight.device)
            self.ranks.send(update, number)
            scaled = sharded_as(update, weight).to(weight.dtype) * (0.2 * max(weight.shape) ** 0.5)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(scaled, alpha=-rate)

    def _direction(self, weight: Tensor, momentum: float) -> Tensor:
        """Where Nesterov's momentum leads, which is kept for the next step; held as `weight` is."""
        gradient = weight.grad
        assert gradient is not None, "only weights that have one are moved"
        kept = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(gradient))
        kept.lerp_(gradient, 1 - momentum)
        return gradient.lerp(kept, momentum)


def rounds(weights: list[Tensor], processes: int) -> list[list[Tensor]]:
    """`weights` in groups of `processes`, alike in what the iteration costs: a round lasts as long as its largest."""
    by_cost = sorted(weights, key=lambda weight: -iteration_flop(*weight.shape))
    return [by_cost[start : start + processes] for start in range(0, len(by_cost), processes)]


def iteration_flop(rows: int, columns: int) -> int:
    """Of one Newton-Schulz step: two products with the longer side, one of squares of the shorter."""
    short, long = sorted((rows, columns))
    return 2 * short**2 * (2 * long + short)


def orthogonal(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The nearest matrix whose singular values are one, nearly: from 0.74 to 1.26 where they are 0.003 of the largest
    and more. In the dtype of its products: `dtype` on a CPU, bfloat16 elsewhere, as torch's.

    A gradient's largest singular value is most of its norm, and the median a few thousandths of it: what the largest is
    taken for decides how much of the rest is reached. It is at most the eighth root of the sum of their eighth powers,
    a percent above it here, and the first iteration holds that already.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(products(matrix, dtype))
    x = x / x.norm().clamp(min=1e-7)
    gram = x @ x.T
    square = gram @ gram
    largest = torch.linalg.vector_norm(square, dtype=torch.float32).sqrt().sqrt().clamp(min=1e-7)
    x, gram, square = (x / largest).to(x.dtype), (gram / largest**2).to(x.dtype), (square / largest**4).to(x.dtype)
    a, b, c = QUINTICS[0]
    x = torch.addmm(x, b * gram + c * square, x, beta=a)
    for a, b, c in QUINTICS[1:]:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T.contiguous() if tall else x


def products(matrix: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What the iteration on `matrix` is made in."""
    return dtype if matrix.device.type == "cpu" else torch.bfloat16


class Optimiser:
    """One or two of torch's optimisers that share the draft's parameters, stepped as one.

    `unit_A`: what one of the columns of `fc` counts in, the deviation of the tap it reads: taps of one target differ
    tenfold, and a step of one size for all would move what the largest say by a hundred times what the smallest do.
    `fc` is moved as if it read taps divided by it; what decays is a share of each weight, whatever its column's unit.
    """

    def __init__(self, parts: list[torch.optim.Optimizer], fc: Tensor, unit_A: Tensor | None) -> None:
        self.parts, self.fc, self.unit_A = parts, fc, unit_A

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(part.param_groups for part in self.parts))

    def gradient_in_units(self) -> None:
        """Before anything is clipped: the gradient of what `fc` holds in units of its columns."""
        if self.unit_A is not None and self.fc.grad is not None:
            local(self.fc.grad).div_(self.unit_A)

    @torch.no_grad()
    def step(self) -> None:
        fc, unit_A, group = local(self.fc), self.unit_A, self.group(self.fc)
        decayed = fc * (1 - group["lr"] * group["weight_decay"])
        for part in self.parts:
            part.step()
        if unit_A is not None:
            fc.sub_(decayed).div_(unit_A).add_(decayed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def kept(self, parameter: Tensor) -> tuple[str, ...]:
        """The names of what is kept of this parameter from step to step: a checkpoint holds it, a resume wants it."""
        muon = isinstance(self.owner(parameter), Muon)
        return ("momentum_buffer",) if muon else ("step", "exp_avg", "exp_avg_sq")

    def group(self, parameter: Tensor) -> dict[str, Any]:
        """The parameter's own: its rate, its decay."""
        return next(group for group in self.param_groups if any(parameter is one for one in group["params"]))

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


def make_optimiser(
    draft: Draft,
    settings: TrainSettings,
    unit_A: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
) -> Optimiser:
    """Decay on matrices only; `dtype`: that of the matrix products; `ranks`: who else trains this draft. `fused`: one
    pass over the parameters in place of one a tensor and operation.

    Muon's updates are scaled to the size of AdamW's (torch's `match_rms_adamw`), so that one learning rate serves both.
    """
    named = trained(draft)
    inside = [name for name, parameter in named.items() if parameter.dim() == 2 and name not in OUTSIDE]
    inner = inside if settings.optimiser == "muon" else []
    rest = [parameter for name, parameter in named.items() if name not in inner]
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.dim() != 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)
    if not inner:
        return Optimiser([adamw], draft.fc.weight, unit_A)
    muon = Muon(
        [named[name] for name in inner],
        dtype,
        ranks,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
    )
    return Optimiser([muon, adamw], draft.fc.weight, unit_A)


def learning_rate(step: int, steps: int, settings: TrainSettings) -> float:
    """Linear warm-up over `warmup` of the steps, then a cosine down to `final_learning_rate` of the peak."""
    warm = max(1, round(settings.warmup * steps))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    floor = settings.final_learning_rate
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
