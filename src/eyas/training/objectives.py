"""What a row of draft logits is scored by: one plug-in point, a loss and its slope made in the same pass.

p is the teacher's distribution over the draft vocabulary, q = softmax of the row's logits, alpha = sum min(p, q): the
chance that a server which samples accepts a token drawn from q (Leviathan et al., arXiv 2211.17192). Total variation is
1 - alpha. LK losses: arXiv 2602.23881, here row by row (SpecForge 0.2.0 takes the alpha of a batch).

Shapes: C a chunk of rows, D draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eyas.recipe import TrainSettings

Score = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [C, D], their softmax [C, D], their log sum exp [C], teacher [C, D]) to loss [C] and its slope by the logits
[C, D]. Logits and softmax may be overwritten, the teacher never: it is other rows' too."""

LEAST = 1e-30
"""What a probability counts as at least, where its logarithm is taken."""
LEAST_ALPHA = 1e-6


@dataclass(frozen=True)
class Objective:
    """What `train.loss` names."""

    score: Score
    coupled: bool = False
    """The score is total variation, and the steps of a chain are weighed by one another's acceptance (chains.py)."""


def soft_cross_entropy(
    logits_CD: Tensor, shares_CD: Tensor, log_norm_C: Tensor, teacher_CD: Tensor
) -> tuple[Tensor, Tensor]:
    """- sum p log q. Its slope, q - p, is that of the forward KL divergence too."""
    loss_C = log_norm_C - torch.linalg.vecdot(logits_CD, teacher_CD)
    return loss_C, torch.sub(shares_CD, teacher_CD, out=logits_CD)


def reverse_kl(logits_CD: Tensor, shares_CD: Tensor, log_norm_C: Tensor, teacher_CD: Tensor) -> tuple[Tensor, Tensor]:
    """sum q log (q / p): seeks one of the teacher's modes, where the forward divergence covers all."""
    ratio_CD = logits_CD - log_norm_C[:, None] - teacher_CD.clamp_min(LEAST).log()
    loss_C = torch.linalg.vecdot(shares_CD, ratio_CD)
    return loss_C, shares_CD.mul_(ratio_CD.sub_(loss_C[:, None]))


def total_variation(
    logits_CD: Tensor, shares_CD: Tensor, log_norm_C: Tensor, teacher_CD: Tensor
) -> tuple[Tensor, Tensor]:
    """1 - alpha: the chance that a drawn token is refused."""
    alpha_C, slope_CD = _acceptance(shares_CD, teacher_CD)
    return 1 - alpha_C, slope_CD.neg_()


def lk_alpha(logits_CD: Tensor, shares_CD: Tensor, log_norm_C: Tensor, teacher_CD: Tensor) -> tuple[Tensor, Tensor]:
    """- log alpha: as total variation, but its slope does not vanish where draft and teacher hardly meet."""
    alpha_C, slope_CD = _acceptance(shares_CD, teacher_CD)
    alpha_C = alpha_C.clamp_min(LEAST_ALPHA)
    return -alpha_C.log(), slope_CD.div_(-alpha_C[:, None])


def lk_lambda(
    logits_CD: Tensor, shares_CD: Tensor, log_norm_C: Tensor, teacher_CD: Tensor, decay: float
) -> tuple[Tensor, Tensor]:
    """w KL(p, q) + (1 - w) (1 - alpha) with w = exp(- decay alpha), no gradient through w: divergence first, acceptance
    where the two have come near."""
    entropy_C = -torch.linalg.vecdot(teacher_CD, teacher_CD.clamp_min(LEAST).log())
    divergence_C = log_norm_C - torch.linalg.vecdot(teacher_CD, logits_CD) - entropy_C
    alpha_C, slope_CD = _acceptance(shares_CD, teacher_CD)
    weight_C = (-decay * alpha_C).exp()
    near = shares_CD.sub_(teacher_CD).mul_(weight_C[:, None])
    return weight_C * divergence_C + (1 - weight_C) * (1 - alpha_C), near.sub_(slope_CD.mul_(1 - weight_C[:, None]))


def _acceptance(shares_CD: Tensor, teacher_CD: Tensor) -> tuple[Tensor, Tensor]:
    """alpha [C] and d alpha / d logits [C, D]: q (1[q < p] - sum of q where q < p)."""
    below_CD = (shares_CD < teacher_CD).to(shares_CD.dtype)
    inside_C = torch.linalg.vecdot(shares_CD, below_CD)
    return torch.minimum(shares_CD, teacher_CD).sum(dim=-1), below_CD.sub_(inside_C[:, None]).mul_(shares_CD)


SOFT_CROSS_ENTROPY = Objective(soft_cross_entropy)


def objective_of(settings: TrainSettings) -> Objective:
    """The objective that `train.loss` names."""
    match settings.loss:
        case "soft_cross_entropy":
            return SOFT_CROSS_ENTROPY
        case "reverse_kl":
            return Objective(reverse_kl)
        case "total_variation":
            return Objective(total_variation)
        case "lk_alpha":
            return Objective(lk_alpha)
        case "lk_lambda":
            return Objective(partial(lk_lambda, decay=settings.lk_decay))
        case "accept_length":
            return Objective(total_variation, coupled=True)
