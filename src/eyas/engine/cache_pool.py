"""Cache rows as a budget: which texts have them, and which prompts' rows can be used again.

A prompt's rows are made in chunks (forward.PREFILL_ROWS) whose bits depend on the tokens up to their end and on nothing
else, so whole chunks of one prompt are copied for another that begins with the same tokens.
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


class CachePool:
    """At most `budget` rows, in use or remembered; the least lately used prompts make room for new texts."""

    def __init__(self, budget: int, chunk: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.budget, self.chunk, self.dtype, self.device = budget, chunk, dtype, device
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
        """A place of `rows` rows with as much of `prompt` as another has computed; None while there is no room."""
        rows = attended_length(rows - 1)
        if self.rows_used + rows > self.budget:
            return None
        donor, shared = self._donor(prompt)
        keep = [] if donor is None else [donor]
        while self.rows_used + self.rows_remembered + rows > self.budget:
            forgotten = next((place for place in self.remembered if place not in keep), None)
            if forgotten is None:
                donor, shared, keep = None, 0, []
                continue
            self.remembered.remove(forgotten)
        place = Place(KVCache(self.dtype, self.device), rows, tuple(prompt), shared, shared)
        place.cache.reserve(rows)
        if donor is not None and shared:
            place.cache.copy(donor.cache, shared)
            place.taps = _first(donor.taps, shared)
            if donor in self.remembered:
                self.remembered.remove(donor)
                self.remembered.append(donor)
        self.used.append(place)
        return place

    def release(self, place: Place) -> None:
        """The text is finished; what is computed of its prompt stays as long as no one else needs the room."""
        self.used.remove(place)
        whole = place.filled // self.chunk * self.chunk
        if whole == 0:
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
        """Who has computed most of `prompt`, and how many rows in whole chunks; its last row is always left."""
        best, most = None, 0
        for place in (*self.used, *self.remembered):
            common = min(_common(prompt, place.prompt), place.filled, len(prompt) - 1) // self.chunk * self.chunk
            if common > most:
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
