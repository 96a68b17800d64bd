"""Rows of several texts in one forward: what goes in, and each text's part of what comes out.

Shapes: R rows of one text, V vocabulary, A width of the concatenated taps, P path.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from eyas.engine.cache import KVCache


@dataclass(frozen=True)
class TextRows:
    """A chain of rows at positions start..., or the last len(ids) rows of the tree `parents` whose root is there.

    Row i of the tree lies in cache slot start + i.
    """

    cache: KVCache
    ids: Sequence[int]
    start: int
    parents: Sequence[int] | None = None


class Verified(Protocol):
    """The rows of one text in a verify forward."""

    def keep(self, path: Sequence[int]) -> None:
        """Rows `path`, ascending from 0, stand: they become cache rows start, start + 1, ..."""

    def taps(self, path: Sequence[int] | None = None) -> Tensor:
        """Concatenated taps [1, R, A], ascending boundaries; [1, P, A] of rows `path`."""
        ...


Lanes = Iterator[tuple[Tensor, Verified]]
"""For each text its float32 logits [R, V] and its rows, both to be done with before the next is taken."""
