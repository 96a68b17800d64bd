"""Progress on stderr: a live bar on a terminal, a line every few seconds elsewhere. --json owns stdout."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

console = Console(stderr=True)
LINE_EVERY_S = 5.0


def mute() -> None:
    """Say nothing from now on: another process says the same (training shared among several)."""
    console.quiet = True


def muted() -> bool:
    return console.quiet


def say(text: str) -> None:
    """One line for the person watching, on stderr."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Progress:
    """`with Progress("capture", total=90_000, unit="tokens") as bar: bar.advance(512, note="loss 2.1")`.

    Shows done/total, rate in units a second, ETA and the latest note. `done` is where a resumed job starts: it
    counts towards the total, not towards the rate.
    """

    def __init__(self, label: str, total: int, unit: str, done: int = 0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.count = self.first = done
        self.started = self.last_line = time.monotonic()
        self.note = ""
        self.bar: Bar | None = None

    def __enter__(self) -> Self:
        self.started = self.last_line = time.monotonic()
        if console.is_terminal and not console.quiet:
            self.bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}  {task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=self.total, completed=self.count, unit=self.unit, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif kind is None and time.monotonic() - self.started > 1.0:
            self._line()

    @property
    def rate(self) -> float:
        """Units a second since the start (or the resume)."""
        return (self.count - self.first) / max(time.monotonic() - self.started, 1e-9)

    def advance(self, units: int, note: str = "") -> None:
        """Count `units` more as done; `note` replaces the text shown beside the rate."""
        self.count += units
        self.note = note or self.note
        if self.bar is not None:
            self.bar.update(self.task, completed=self.count, note=f"{self.rate:,.0f} {self.unit}/s  {self.note}")
        elif time.monotonic() - self.last_line >= LINE_EVERY_S:
            self._line()

    def _line(self) -> None:
        self.last_line = time.monotonic()
        if console.quiet:
            return
        eta = (self.total - self.count) / self.rate if self.rate > 0 and self.total > self.count else 0.0
        print(
            f"{self.label}: {self.count:,}/{self.total:,} {self.unit}, {self.rate:,.0f} {self.unit}/s, "
            f"ETA {eta:,.0f} s{'; ' + self.note if self.note else ''}",
            file=sys.stderr,
            flush=True,
        )
