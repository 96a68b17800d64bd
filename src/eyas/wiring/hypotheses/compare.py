"""Two wirings over the same rows: the mean difference of their losses, with an interval from whole documents.

Shapes: R paired rows, N documents, B bootstrap resamples.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 2000
TAIL = 0.005
"""Each side of the 99 % interval: some thirty wirings are compared, and a false finding is worse than a missed one."""
NATS = 0.05
"""The smallest effect that is a finding. Taps one layer off are 'significant' at 0.002 nats and mean nothing."""
FEWEST_DOCUMENTS = 4
"""Resampling fewer documents than these tells nothing."""


@dataclass(frozen=True)
class Effect:
    """Nats a row that the other wiring is better by (negative: worse), and the interval around it."""

    nats: float
    low: float
    high: float

    @property
    def better(self) -> bool:
        """Clearly better: large enough to matter, and surely so."""
        return self.nats >= NATS and self.low > 0

    @property
    def worse(self) -> bool:
        return self.nats <= -NATS and self.high < 0

    @property
    def untold(self) -> bool:
        """Neither: these rows cannot tell the two wirings apart."""
        return not (self.better or self.worse)

    def words(self) -> str:
        return f"{self.nats:+.3f} nats ({self.low:+.3f} to {self.high:+.3f})"


def level(losses: Mapping[str, Tensor], guess: float) -> dict[str, Tensor]:
    """Losses [R] by wiring, each over the same rows: those that any wiring's vocabulary can say.

    NaN marks a row that a wiring's cannot: it is given `guess`, the nats of a uniform guess, unless none can.
    """
    sayable_R = torch.stack(list(losses.values())).isfinite().any(dim=0)
    blank = torch.tensor(float("nan"))
    return {name: loss_R.nan_to_num(nan=guess).where(sayable_R, blank) for name, loss_R in losses.items()}


def paired(declared_R: Tensor, other_R: Tensor, document_R: Tensor, seed: int = 0) -> Effect:
    """Mean of `declared - other` over the rows that both have (not NaN), documents resampled with replacement."""
    difference_R = (declared_R - other_R).double()
    both = difference_R.isfinite()
    difference_R, document_R = difference_R[both], document_R[both]
    if not len(difference_R):
        return Effect(0.0, float("-inf"), float("inf"))
    _, document_R = document_R.unique(return_inverse=True)
    count = int(document_R.max()) + 1
    sums_N = torch.zeros(count, dtype=torch.float64).index_add_(0, document_R, difference_R)
    rows_N = torch.bincount(document_R, minlength=count).double()
    mean = float(sums_N.sum() / rows_N.sum())
    if count < FEWEST_DOCUMENTS:
        return Effect(mean, float("-inf"), float("inf"))
    generator = torch.Generator().manual_seed(seed)
    drawn_BN = torch.randint(count, (RESAMPLES, count), generator=generator)
    means_B = sums_N[drawn_BN].sum(dim=1) / rows_N[drawn_BN].sum(dim=1)
    low, high = means_B.quantile(torch.tensor([TAIL, 1 - TAIL], dtype=torch.float64)).tolist()
    return Effect(mean, low, high)
