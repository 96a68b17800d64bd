"""What the target thought of the tokens that were emitted: a judge that writes it down beside another's choices.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.engine.tree import Tree
from eyas.engine.verify import Judge, Walk


@dataclass(frozen=True)
class TokenLogprob:
    """Logarithms of probabilities, before any bias, penalty or filter. `top`: the likeliest, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class NotingJudge:
    """Chooses as `judge` does. `notes` has an entry for each emitted token, `top` likeliest ones in it."""

    def __init__(self, judge: Judge, top: int) -> None:
        self.judge, self.top = judge, top
        self.valid = judge.valid
        self.notes: list[TokenLogprob] = []
        self._latest: list[TokenLogprob] = []

    def walk(self, tree: Tree, logits_RV: Tensor) -> Walk:
        walk = self.judge.walk(tree, logits_RV)
        rows_RV = torch.log_softmax(logits_RV[list(walk.rows)].float(), dim=-1)
        values, ids = rows_RV.topk(max(self.top, 1))
        self._latest = [
            TokenLogprob(token, float(rows_RV[row, token]), tuple(zip(best, likely, strict=True))[: self.top])
            for row, (token, best, likely) in enumerate(zip(walk.tokens, ids.tolist(), values.tolist(), strict=True))
        ]
        return walk

    def tell(self, tokens: Sequence[int]) -> None:
        self.notes += self._latest[: len(tokens)]
        self.judge.tell(tokens)
