"""Drafting without a model: what followed the latest earlier occurrence of the last tokens (prompt lookup)."""

from collections.abc import Sequence

from torch import Tensor

from eyas.engine.tree import Tree, chain

SHORTEST = 2
"""Of single tokens nearly every one has occurred before, and what followed says little."""


class NgramProposer:
    """Looks for the longest suffix of the text, of at most `longest` tokens, that occurred before."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.lengths = range(max(1, longest), min(SHORTEST, longest) - 1, -1)
        self.ids: list[int] = []
        self.match = 0
        self._ends: dict[tuple[int, ...], int] = {}

    def fork(self) -> "NgramProposer":
        return NgramProposer(self.longest)

    def reserve(self, rows: int) -> None:
        """It keeps no rows."""

    def begin(self) -> None:
        """A new text."""
        self.ids, self._ends, self.match = [], {}, 0

    def observe(self, taps_BRA: Tensor | None, ids: Sequence[int], start: int) -> None:
        """`ids` follow the tokens at start, start + 1, ...: the prompt's from its second on, then what is emitted."""
        assert start == len(self.ids), "tokens are told once, in order"
        for token in ids:
            # The last token's own n-grams are filed only when another follows: a match has something after it.
            for length in self.lengths:
                if length <= len(self.ids):
                    self._ends[tuple(self.ids[-length:])] = len(self.ids)
            self.ids.append(token)

    def propose(self, num_steps: int) -> Tree:
        """What followed the match, and no tokens without one; `match` is its length.

        Past the end of the text it goes on with what it has itself drafted: a loop is drafted as a loop.
        """
        self.match, place = self._longest()
        tokens = list(self.ids)
        for index in range(num_steps if self.match else 0):
            tokens.append(tokens[place + index])
        return chain(tokens[len(self.ids) :])

    def _longest(self) -> tuple[int, int]:
        for length in self.lengths:
            place = self._ends.get(tuple(self.ids[-length:])) if length <= len(self.ids) else None
            if place is not None:
                return length, place
        return 0, 0
