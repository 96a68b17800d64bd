"""The teacher: the target's own next-token distribution, from its stored last hidden state.

Shapes: R rows, H target hidden, V target vocabulary, D draft vocabulary, T a sample's rows.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.models.target import Target

ROWS = 256
"""Rows multiplied with the whole head at once: the logits of 256 rows of a large vocabulary stay under 200 MB."""


class Teacher:
    """The target's final norm and head, whole for the argmax and sliced to the draft vocabulary for the loss.

    `last_hidden_norm` says whether the stored states are from `before` or `after` the final norm: they are normed
    exactly once, by the target's own module. Logits are float32, with the target's scale and soft-cap.
    """

    def __init__(self, target: Target, ids_D: Tensor, last_hidden_norm: Literal["before", "after"]) -> None:
        self.target, self.last_hidden_norm = target, last_hidden_norm
        head = target.head
        self.weight_DH = head.weight[ids_D].contiguous()
        self.bias_D = None if head.bias is None else head.bias[ids_D]
        self.cast = (self.weight_DH, self.bias_D)
        """The two in the dtype that was asked for last: it is the same in every step."""

    def normed(self, last_hidden_RH: Tensor) -> Tensor:
        """States as the head wants them, in the target's dtype."""
        states = last_hidden_RH.to(self.weight_DH.device, self.weight_DH.dtype)
        return self.target.final_norm(states) if self.last_hidden_norm == "before" else states

    def probabilities(self, last_hidden_RH: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """softmax [R, D], float32, over the draft vocabulary's slice of the logits. `dtype`: that of the product."""
        if self.cast[0].dtype != dtype:
            self.cast = (self.weight_DH.to(dtype), None if self.bias_D is None else self.bias_D.to(dtype))
        logits = F.linear(self.normed(last_hidden_RH).to(dtype), *self.cast).float()
        return self.target.scaled(logits).softmax(dim=-1)

    def argmax(self, last_hidden_TH: Tensor) -> Tensor:
        """The target's full-vocabulary argmax after each row [T], ties to the lowest id."""
        chunks = [self.target.logits(rows).float().argmax(dim=-1) for rows in self.normed(last_hidden_TH).split(ROWS)]
        return torch.cat(chunks).to(last_hidden_TH.device)

    def expected_counts(self, last_hidden_TH: Tensor) -> Tensor:
        """How often each token follows these rows, by the target's own probabilities [V], float64."""
        chunks = self.normed(last_hidden_TH).split(ROWS)
        shares = [self.target.logits(rows).float().softmax(-1).sum(0) for rows in chunks]
        return torch.stack(shares).sum(0).double().cpu()


def next_tokens(ids_T: Tensor) -> Tensor:
    """The token that follows each row, [T]; -1 after the last."""
    return torch.cat([ids_T[1:].to(torch.int64), ids_T.new_full((1,), -1, dtype=torch.int64)])
