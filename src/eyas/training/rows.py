"""Which rows are trained at which TTT step: the alignment of states, tokens and teachers, stated once.

Row t holds the state of token t and the id of token t + 1, and predicts token t + 2. At step s it is fed the id of
token t + 1 + s and predicts token t + 2 + s; the teacher is the target's prediction at position t + 1 + s. It is
supervised at step s when tokens t + 1 .. t + 2 + s all belong to the answer: so the first draft of an answer (t = the
prompt's last token) is trained, and nothing beyond its end is.

Shapes: T packed rows, R[s] rows supervised at step s.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of packed documents. `starts` are the documents' first rows, and T at the end."""

    starts: tuple[int, ...]
    positions_T: Tensor
    """Rotary position of each row at step 0: it restarts with each document."""
    index: tuple[Tensor, ...]
    """Per step the packed rows that are supervised, ascending [R[s]]."""
    inside: tuple[Tensor, ...]
    """Per step s >= 1 where `index[s]` lies in `index[s - 1]`; `inside[0]` is `index[0]`."""

    @property
    def steps(self) -> int:
        return len(self.index)

    def per_document(self, step: int) -> list[int]:
        """How many rows of each document are supervised at `step`."""
        ends = torch.searchsorted(self.index[step].cpu(), torch.tensor(self.starts))
        return (ends[1:] - ends[:-1]).tolist()

    def only(self, step: int, kept_R: Tensor) -> "Rows":
        """Of the rows of `step` those that `kept_R` says, and no others at any later one."""
        index = list(self.index)
        index[step] = index[step][kept_R]
        for later in range(step + 1, self.steps):
            index[later] = index[later][torch.isin(index[later], index[step])]
        return Rows(self.starts, self.positions_T, tuple(index), _inside(index))

    def to(self, device: torch.device) -> "Rows":
        return Rows(
            self.starts,
            self.positions_T.to(device),
            tuple(index.to(device) for index in self.index),
            tuple(inside.to(device) for inside in self.inside),
        )


def supervise(mask_T: Tensor, lengths: list[int], steps: int) -> Rows:
    """The rows of documents of `lengths`, packed one after another, whose `mask_T` says which tokens are answers."""
    assert mask_T.numel() == sum(lengths), "the mask covers the packed documents"
    starts = (0, *torch.tensor(lengths).cumsum(0).tolist())
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    remaining_T = torch.cat([torch.arange(length - 1, -1, -1) for length in lengths])
    answer_T = mask_T.bool()
    supervised_T = _ahead(answer_T, 1) & (remaining_T >= 1)
    index: list[Tensor] = []
    for step in range(steps):
        supervised_T = supervised_T & _ahead(answer_T, 2 + step) & (remaining_T >= 2 + step)
        index.append(supervised_T.nonzero()[:, 0])
    return Rows(starts, positions_T, tuple(index), _inside(index))


def _inside(index: list[Tensor]) -> tuple[Tensor, ...]:
    return (index[0], *(torch.searchsorted(before, now) for before, now in pairwise(index)))


def _ahead(answer_T: Tensor, shift: int) -> Tensor:
    """Whether the token `shift` ahead is an answer's; False beyond the end."""
    ahead = torch.zeros_like(answer_T)
    ahead[:-shift] = answer_T[shift:]
    return ahead
