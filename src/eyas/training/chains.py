"""Rows that are steps of one chain, scored together: the expected accept length.

A token drawn from the draft at step i is accepted with chance alpha_i (objectives.py), and a chain survives step s with
chance alpha_0 .. alpha_s, so the sum of these is its expected accept length, less the token that the target adds. A row
loses 1 - alpha_0 .. alpha_s. A step then matters by what comes before it and by what hangs on it: the slope by alpha_s
is the chance to get there times what is still to come. A step whose token the draft cannot say ends its chain.

Shapes: C rows in the loss, by chain and then by step; P rows of whole chains among them; J chains, S steps.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chains:
    """Which chain, ascending, and which step of it each row is."""

    chain_C: Tensor
    step_C: Tensor
    steps: int

    def bounds(self, rows: int) -> list[int]:
        """Where chunks of at most `rows` (at least a chain's) begin and end that cut no chain."""
        begins = torch.cat([self.chain_C.new_ones(1, dtype=torch.bool), self.chain_C[1:] != self.chain_C[:-1]])
        starts = [*begins.nonzero()[:, 0].tolist(), len(self.chain_C)] if len(self.chain_C) else [0]
        bounds = [0]
        for here, following in pairwise(starts):
            if following - bounds[-1] > rows:
                bounds.append(here)
        return bounds if bounds[-1] == len(self.chain_C) else [*bounds, len(self.chain_C)]

    def coupled(self, part: slice, alpha_P: Tensor, weight_P: Tensor) -> tuple[Tensor, Tensor]:
        """Of a chunk's rows the loss, 1 less the chance that the chain survives this step, and minus the slope of the
        chunk's weighted loss by the row's alpha."""
        chain_P, step_P = self.chain_C[part] - self.chain_C[part.start], self.step_C[part]
        chains = int(chain_P[-1]) + 1
        alpha_JS, weight_JS = (alpha_P.new_zeros((chains, self.steps)) for _ in range(2))
        alpha_JS[chain_P, step_P], weight_JS[chain_P, step_P] = alpha_P, weight_P
        survival_JS = alpha_JS.cumprod(dim=1)
        reached_JS = torch.cat([torch.ones_like(alpha_JS[:, :1]), survival_JS[:, :-1]], dim=1)
        hanging = [weight_JS[:, -1]]
        for step in range(self.steps - 2, -1, -1):
            hanging.append(weight_JS[:, step] + alpha_JS[:, step + 1] * hanging[-1])
        slope_JS = reached_JS * torch.stack(hanging[::-1], dim=1)
        return 1 - survival_JS[chain_P, step_P], slope_JS[chain_P, step_P]


def chains_of(rows: list[Tensor], first_row_R: Tensor) -> tuple[Tensor, Chains]:
    """The order [C] that puts rows, given one step after another, by chain and then by step; and the chains, each a row
    of step 0 (`first_row_R`) that is in the loss at any step."""
    row_C = torch.cat(rows)
    step_C = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(one) for one in rows])).to(row_C.device)
    order_C = torch.argsort(row_C, stable=True)
    chain_C = torch.searchsorted(first_row_R, row_C[order_C])
    return order_C, Chains(chain_C, step_C[order_C], len(rows))
