"""What a server's log says: engine, state, phase, progress and cause, as of its last line.

A log alone never says stuck: silence is no evidence (docs/causes.md).
"""

import os
import stat
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from eyas.errors import InputError
from eyas.launch.lines import LineSplitter, printable

Engine = Literal["sglang", "vllm", "embedded", "llamacpp"]
BLOCK_BYTES = 1 << 18
FINGERPRINT_BYTES = 64


@dataclass(frozen=True)
class LogState:
    """A log as of its last line. `engine` None: the text is no server start, and `state` is unknown."""

    engine: Engine | None = None
    state: str = "unknown"
    """starting loading warming ready stopped crashed unknown."""
    phase: str | None = None
    """args distributed weights draft_weights kv_cache compile graphs http warmup ready; a dead server's last."""
    progress: float | None = None
    """Share of the phase that is done, 0 to 1, where the log has a bar."""
    shards: tuple[int, int] | None = None
    """Checkpoint shards read and in all, in the phases weights and draft_weights."""
    cause: str | None = None
    """Code of launch/causes."""
    evidence: str | None = None
    """The log line that explains, printable."""
    advice: str | None = None
    last_lines: tuple[str, ...] = ()
    """Printable, escapes removed, clipped; a bar's updates count once."""
    phase_starts: dict[str, datetime | None] = field(default_factory=dict)
    """When each phase began, by the lines' own time stamps (local time, without zone)."""
    last_time: datetime | None = None
    lines: int = 0
    bytes_read: int = 0


class LogReader:
    """A log followed in bounded memory, whatever it holds: escapes, carriage returns, no UTF-8, megabyte lines.

    A rotated file is read to its end before the new one; a truncated one from its start.

    Raises `InputError` where `path` is not a readable regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open(path)
        self._fingerprint = b""
        self._splitter = LineSplitter()
        self._bytes_read = 0
        self._lines = 0
        self._last: list[str] = []

    def poll(self) -> LogState:
        """The state after all that was written since the last poll."""
        self._follow_truncation()
        self._drain()
        if self._rotated():
            self._file.close()
            self._file = _open(self.path)
            self._fingerprint = b""
            self._drain()
        return self._state()

    def _drain(self) -> None:
        while block := self._file.read(BLOCK_BYTES):
            self._bytes_read += len(block)
            self._fingerprint = (self._fingerprint + block)[-FINGERPRINT_BYTES:]
            for line in self._splitter.feed(block):
                self._lines += 1
                self._last = [*self._last[-19:], line]

    def _follow_truncation(self) -> None:
        """Start over where the bytes already read are no longer what the file holds."""
        at = self._file.tell()
        known = self._fingerprint
        if os.pread(self._file.fileno(), len(known), at - len(known)) != known:
            self._file.seek(0)
            self._fingerprint = b""

    def _rotated(self) -> bool:
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False  # moved away, the next one is not there yet
        ours = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    def _state(self) -> LogState:
        rest = self._splitter.rest()
        shown = [*self._last, rest] if rest else self._last
        return LogState(
            last_lines=tuple(printable(line) for line in shown[-20:]),
            lines=self._lines + bool(rest),
            bytes_read=self._bytes_read,
        )


def read_log(path: Path) -> LogState:
    """The whole log at once. Raises `InputError` where there is none."""
    return LogReader(path).poll()


def _open(path: Path):
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _no_log(path, "not a regular file")
        return path.open("rb", buffering=0)
    except OSError as error:
        raise _no_log(path, error.strerror or str(error)) from error


def _no_log(path: Path, got: str) -> InputError:
    return InputError(
        wanted="a server's log",
        got=got,
        where=str(path),
        next="name the file that holds the server's stdout and stderr: eyas watch --log FILE",
    )
