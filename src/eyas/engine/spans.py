"""Where a round's time goes: laps of one clock, by name. Off, a lap is an empty call.

The clock is read once a lap and all time between two laps belongs to the second's name, so that the shares of a round
add up to it. On CUDA work is queued: the lap that waits for it is charged.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

Lap = Literal["draft", "verify", "sampling", "cache", "host"]
"""Proposing (the draft's rows rewritten included); target's forward and head; judging; rows kept, told; the rest."""


class NoSpans:
    """Records nothing."""

    def start(self) -> None:
        pass

    def lap(self, name: Lap) -> None:
        pass


@dataclass
class Spans(NoSpans):
    """Seconds by name since it was made, of the rounds of every text meanwhile."""

    seconds: dict[Lap, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: Lap) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def start(self) -> None:
        """What lies between the last lap and now belongs to no name (a prefill, another text)."""
        self._last = time.perf_counter()

    def shares(self) -> dict[str, float]:
        """Each name's part of the whole, rounded to a thousandth."""
        whole = sum(self.seconds.values()) or 1.0
        return {name: round(seconds / whole, 3) for name, seconds in self.seconds.items()}
