"""Which token comes next: the argmax, or a draw whose randomness belongs to the prompt, not to the batch.

Shapes: R rows, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """Greedy at temperature 0; else a draw from softmax(logits / temperature) cut to its `top_p` nucleus."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def uniforms(self, key: str, count: int) -> list[float]:
        """The `count` uniform numbers in [0, 1) that decide the answer to the prompt `key`."""
        if self.greedy:
            return []
        digest = hashlib.sha256(f"{self.seed}:{key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.rand(count, generator=generator, dtype=torch.float64).tolist()

    def pick(self, logits_RV: Tensor, uniforms: Sequence[float]) -> list[int]:
        """One token a row; `uniforms` holds one number a row (ignored when greedy). Ties go to the lowest id."""
        if self.greedy:
            return logits_RV.argmax(-1).tolist()
        probabilities = torch.softmax(logits_RV.double() / self.temperature, dim=-1)
        draws = torch.tensor(uniforms, dtype=torch.float64)[:, None]
        if self.top_p < 1.0:
            return self._pick_nucleus(probabilities, draws)
        cumulative = probabilities.cumsum(-1)
        return _inverse(cumulative, draws * cumulative[:, -1:])[:, 0].tolist()

    def _pick_nucleus(self, probabilities: Tensor, draws: Tensor) -> list[int]:
        """The fewest most likely tokens whose probabilities reach top_p, drawn from by inverse distribution.

        To sort a vocabulary of 49,152 takes as long as a forward: rows whose nucleus lies in their first tokens for
        certain have only those sorted.
        """
        if probabilities.shape[-1] <= FIRST:
            return self._draw(*_ordered(probabilities), draws)
        ids = probabilities.topk(FIRST, dim=-1, sorted=False).indices.sort(dim=-1).values
        first, order = _ordered(probabilities.gather(-1, ids))
        above = first.where(first > first[:, -1:], 0.0)  # of tokens as likely as the last some may be left out
        certain = above.sum(-1) > self.top_p
        picked = torch.tensor(self._draw(first, ids.gather(-1, order), draws))
        if not certain.all():
            picked[~certain] = torch.tensor(self._draw(*_ordered(probabilities[~certain]), draws[~certain]))
        return picked.tolist()

    def _draw(self, ordered: Tensor, ids: Tensor, draws: Tensor) -> list[int]:
        cumulative = ordered.cumsum(-1)
        last = (cumulative < self.top_p).sum(-1, keepdim=True).clamp(max=cumulative.shape[-1] - 1)
        index = _inverse(cumulative, draws * cumulative.gather(-1, last)).minimum(last)
        return ids.gather(-1, index)[:, 0].tolist()


FIRST = 1024


def _ordered(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Falling, the lowest index first among equals; and the indices."""
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    return ordered, ids


def _inverse(cumulative: Tensor, values: Tensor) -> Tensor:
    """First index whose cumulative probability exceeds the value."""
    return torch.searchsorted(cumulative, values, right=True).clamp(max=cumulative.shape[-1] - 1)
