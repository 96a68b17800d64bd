"""What moves in a server between two looks: CPU time, bytes read, memory, the GPUs', processes, lines of its log."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.launch.evidence import Evidence
from eyas.launch.log_state import LogState

CPU_SHARE = 0.02
"""Of a core: below it a tree is idle. Event loops that wait cost up to 0.01."""
RESIDENT_STEP, GPU_STEP = 1 << 20, 1 << 20
PROBE_LINE = re.compile(r'"GET /(?:health|ready|metrics|model_info|server_info|get_\w+|v1/models)\b[^"]*" \d{3}')
WINDOW_S, APART_S = 10.0, 1.0
"""What moves now is told over so long, from marks so far apart."""


@dataclass(frozen=True)
class Mark:
    """Counters as they stood at one time."""

    time: float
    cpu_s: float = 0.0
    read_bytes: int = 0
    resident: int = 0
    gpu_bytes: int = 0
    lines: int = 0
    bytes_read: int = 0
    pids: frozenset[int] = frozenset()


def mark(seen: Evidence, log: LogState, last: Mark | None) -> Mark:
    """The counters of one look; what was not looked at stands as it stood."""
    processes = seen.processes
    base = last or Mark(seen.time)
    return Mark(
        time=seen.time,
        cpu_s=processes.cpu_s if processes is not None else base.cpu_s,
        read_bytes=processes.read_bytes if processes is not None else base.read_bytes,
        resident=processes.resident if processes is not None else base.resident,
        gpu_bytes=seen.gpu_bytes if seen.gpu_bytes is not None else base.gpu_bytes,
        lines=log.lines,
        bytes_read=log.bytes_read,
        pids=frozenset(processes.pids) if processes is not None else base.pids,
    )


def moved(before: Mark, now: Mark) -> bool:
    """Whether the server worked in between, its log apart."""
    seconds = max(now.time - before.time, 1e-9)
    return (
        now.cpu_s - before.cpu_s >= CPU_SHARE * seconds
        or now.read_bytes > before.read_bytes
        or now.resident - before.resident >= RESIDENT_STEP
        or abs(now.gpu_bytes - before.gpu_bytes) >= GPU_STEP
        or now.pids != before.pids
    )


def wrote(before: Mark, log: LogState) -> bool:
    """Whether the log grew by more than the access lines of probes, ours among them."""
    if (log.lines, log.bytes_read) == (before.lines, before.bytes_read):
        return False
    fresh = log.lines - before.lines
    if not 0 <= fresh <= len(log.last_lines):
        return True
    return not all(PROBE_LINE.search(line) for line in log.last_lines[-max(fresh, 1) :])


def recent(marks: Sequence[Mark], now: Mark) -> tuple[Mark, ...]:
    """The marks of the last seconds, `now` the last of them, after one from before where there is none else."""
    if marks and now.time - marks[-1].time < APART_S:
        return tuple(marks)
    kept = [one for one in marks if now.time - one.time <= WINDOW_S]
    return (*(kept or marks[-1:]), now)


def words(before: Mark, now: Mark) -> tuple[str, ...]:
    """What moves and how fast, for people; empty: nothing, or no time has passed."""
    seconds = now.time - before.time
    if seconds < APART_S:
        return ()
    cores, read = (now.cpu_s - before.cpu_s) / seconds, now.read_bytes - before.read_bytes
    memory, gpus = now.resident - before.resident, now.gpu_bytes - before.gpu_bytes
    found = {
        f"{cores:.1f} cores": cores >= CPU_SHARE,
        f"{read / seconds / 1e6:.0f} MB/s read": read > 0,
        f"memory {memory / seconds / 1e6:+.0f} MB/s": memory >= RESIDENT_STEP,
        f"GPU memory {gpus / seconds / 1e6:+.0f} MB/s": abs(gpus) >= GPU_STEP,
    }
    return tuple(said for said, holds in found.items() if holds)
