"""Cache rows as a budget: which texts have them, and which prompts' rows can be used again.

A prompt's rows depend on the tokens up to theirs, to the last bit in multiples of the forward's `grain`, so those of
one prompt are copied for another that begins with the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.engine.cache import KVCache, attended_length


@dataclass(eq=False)
class Place:
    """A text's rows. `filled` of its prompt's are computed; `taps` are theirs, [1, rows, A] a piece."""

    cache: KVCache
    rows: int
    prompt: tuple[int, ...] = ()
    filled: int = 0
    reused: int = 0
    """Rows that were copied from another prompt's."""
    taps: list[Tensor] = field(default_factory=list)


WORTH = 8
"""Rows that are worth copying."""


class CachePool:
    """At most `budget` rows, in use or remembered; the least lately used prompts make room for new texts."""

    def __init__(self, budget: int, grain: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.budget, self.grain, self.dtype, self.device = budget, grain, dtype, device
        self.used: list[Place] = []
        self.remembered: list[Place] = []
        """The latest used last."""

    @property
    def rows_used(self) -> int:
        return sum(place.rows for place in self.used)

    @property
    def rows_remembered(self) -> int:
        return sum(place.rows for place in self.remembered)

    def fits(self, rows: int) -> bool:
        """Whether `rows` could ever be had."""
        return attended_length(rows - 1) <= self.budget

    def take(self, prompt: Sequence[int], rows: int) -> Place | None:
        """A place of `rows` rows for a text that begins with `prompt`; None while there is no room."""
        rows = attended_length(rows - 1)
        if self.rows_used + rows > self.budget:
            return None
        while self.rows_used + self.rows_remembered + rows > self.budget:
            useful, _ = self._donor(prompt)
            unlike = [place for place in self.remembered if place is not useful]
            self.remembered.remove(unlike[0] if unlike else self.remembered[0])
        place = Place(KVCache(self.dtype, self.device), rows, tuple(prompt))
        place.cache.reserve(rows)
        self.used.append(place)
        return place

    def share(self, place: Place) -> None:
        """Copy into a place that has nothing yet as much of its prompt as another has computed."""
        donor, shared = self._donor(place.prompt)
        if donor is None:
            return
        place.cache.copy(donor.cache, shared)
        place.taps = _first(donor.taps, shared)
        place.filled = place.reused = shared
        if donor in self.remembered:
            self.remembered.remove(donor)
            self.remembered.append(donor)

    def release(self, place: Place) -> None:
        """The text is finished; what is computed of its prompt stays as long as no one else needs the room."""
        self.used.remove(place)
        whole = place.filled // self.grain * self.grain
        if whole < WORTH:
            return
        if whole < place.rows:
            shrunk = KVCache(self.dtype, self.device)
            rows = attended_length(whole - 1)
            shrunk.reserve(rows)
            shrunk.copy(place.cache, whole)
            place.cache, place.rows = shrunk, rows
        place.taps, place.filled, place.prompt = _first(place.taps, whole), whole, place.prompt[:whole]
        self.remembered = [other for other in self.remembered if not _begins(place.prompt, other.prompt)]
        self.remembered.append(place)

    def _donor(self, prompt: Sequence[int]) -> tuple[Place | None, int]:
        """Who has computed most of `prompt`, and how many rows; its last row is always left."""
        best, most = None, 0
        for place in (*self.used, *self.remembered):
            common = min(_common(prompt, place.prompt), place.filled, len(prompt) - 1) // self.grain * self.grain
            if common > most and common >= WORTH:
                best, most = place, common
        return best, most


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def _begins(longer: tuple[int, ...], shorter: tuple[int, ...]) -> bool:
    return longer[: len(shorter)] == shorter


def _first(pieces: Sequence[Tensor], rows: int) -> list[Tensor]:
    """The first `rows` rows of taps, as one piece of its own memory; none where nothing is tapped."""
    return [torch.cat(list(pieces), dim=1)[:, :rows].clone()] if pieces else []
