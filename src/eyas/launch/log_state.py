"""What a server's log says: engine, state, phase, progress and cause, as of its last line.

A log alone never says stuck: silence is no evidence (docs/causes.md).
"""

import copy
import os
import stat
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from eyas.errors import InputError
from eyas.formats.engines import Runner
from eyas.launch.causes import UNEXPLAINED, UNEXPLAINED_ADVICE
from eyas.launch.lines import LineSplitter, shown
from eyas.launch.phases import STATES, Engine
from eyas.launch.reading import Reading
from eyas.launch.said_taps import SaidTaps

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
    taps: SaidTaps | None = None
    """The layers that the engine says it reads for the draft, in its own numbers; None: it did not say."""
    runner: Runner | None = None
    """Of vLLM, as its log shows."""
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
    note: str | None = None
    """What stands where the log stood and is none: the log is read on as it was."""


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
        self._reading = Reading(today=datetime.now())
        self._note: str | None = None

    def poll(self, limit: int | None = None) -> LogState:
        """The state after what was written since the last poll, `limit` bytes of it at the most."""
        self._follow_truncation()
        self._drain(limit)
        if self.behind == 0 and (successor := self._successor()) is not None:
            self._file.close()
            self._file = successor
            self._begin_file()
            self._drain(limit)
        return self._state()

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    @property
    def behind(self) -> int:
        """Bytes of the file that are not read yet."""
        return max(0, os.fstat(self._file.fileno()).st_size - self._file.tell())

    def _drain(self, limit: int | None) -> None:
        left = limit if limit is not None else sys.maxsize
        while left > 0 and (block := self._file.read(min(left, BLOCK_BYTES))):
            left -= len(block)
            self._bytes_read += len(block)
            self._fingerprint = (self._fingerprint + block)[-FINGERPRINT_BYTES:]
            for line in self._splitter.feed(block):
                self._reading.read(line)

    def _follow_truncation(self) -> None:
        """Start over where the bytes already read are no longer what the file holds."""
        at = self._file.tell()
        known = self._fingerprint
        if os.pread(self._file.fileno(), len(known), at - len(known)) != known:
            self._file.seek(0)
            self._begin_file()

    def _begin_file(self) -> None:
        self._fingerprint = b""
        if rest := self._splitter.cut():
            self._reading.read(rest)

    def _successor(self) -> BinaryIO | None:
        """The file that took this one's place; what is no file there may become one, and is noted."""
        self._note = None
        ours = os.fstat(self._file.fileno())
        try:
            there = self.path.stat()
            return None if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) else _open(self.path)
        except FileNotFoundError:
            return None  # moved away, the next one is not there yet
        except OSError as error:
            self._note = f"{self.path} cannot be looked at ({error.strerror}): read as far as it was"
        except InputError as error:
            self._note = f"what is at {self.path} now is no log ({error.got}): read as far as it was"
        return None

    def _state(self) -> LogState:
        reading = self._reading
        if rest := self._splitter.rest():
            reading = copy.deepcopy(reading)
            reading.read(rest)
        return _state(reading, self._bytes_read, self._note)


def _state(reading: Reading, bytes_read: int, note: str | None) -> LogState:
    seen = {
        "note": note,
        "last_lines": tuple(shown(line) for line in reading.kept),
        "last_time": reading.last_time(),
        "lines": reading.lines,
        "bytes_read": bytes_read,
    }
    if reading.engine is None:
        return LogState(**seen)
    phase = reading.phase or (None if reading.end else "args")
    state = reading.end or STATES[phase or "args"]
    why = reading.clues.best(reading.end) if reading.end else None
    return LogState(
        engine=reading.engine,
        state=state,
        phase=phase,
        progress=reading.progress,
        shards=reading.shards,
        taps=reading.taps,
        runner=reading.runner,
        cause=(UNEXPLAINED if why.kind == "end" else why.code) if why else None,
        evidence=why.line() if why else None,
        advice=(UNEXPLAINED_ADVICE if why.kind == "end" else why.advice) if why else None,
        phase_starts=dict(reading.phase_starts),
        **seen,
    )


def read_log(path: Path) -> LogState:
    """The whole log at once. Raises `InputError` where there is none."""
    reader = LogReader(path)
    try:
        return reader.poll()
    finally:
        reader.close()


def _open(path: Path) -> BinaryIO:
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
