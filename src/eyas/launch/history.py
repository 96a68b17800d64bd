"""How long each phase of a start took, kept by model, engine, machine and flags; and what that says of the next."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from eyas.run import cache_folder, hash_json, machine

FILE = "starts.jsonl"
KEPT = 5
"""Starts of one kind that are looked at: the latest."""
PLACE_FLAGS = ("--port", "--host", "--nccl-port", "--dist-init-addr")
"""Flags that do not change how long a start takes; their values are left out of the key."""
RATIO = (0.2, 5.0)
"""How far one start's pace is trusted to differ from the recorded one's."""


@dataclass(frozen=True)
class PhaseTime:
    """One phase of one start: its seconds, and where it has a bar, (share done, seconds into the phase) points."""

    phase: str
    seconds: float
    curve: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Expectation:
    """What earlier starts say of this one. `source` says which they were; no phases: nothing is known."""

    phases: tuple[PhaseTime, ...] = ()
    longest: Mapping[str, float] | None = None
    """Phase to its longest recorded seconds."""
    source: str = "no start of this model on this machine is recorded yet: no ETA of the whole"
    older: tuple[tuple[PhaseTime, ...], ...] = ()
    """Earlier starts, newest first: of phases that the latest did without, as what it found compiled."""

    def with_phase(self, phase: str) -> tuple[PhaseTime, ...]:
        """The latest recorded start that went through `phase`; empty: none did."""
        return next((one for one in (self.phases, *self.older) if any(known.phase == phase for known in one)), ())

    def says(self, phase: str) -> str:
        """Which starts an ETA in `phase` rests on, or why there is none."""
        known = self.with_phase(phase)
        if known == self.phases:
            return self.source
        if not known:
            return f"{self.source}: none went through {phase}, so no ETA of the whole"
        return f"{self.source}; {phase} by an older one, for the latest did without"

    def allowed(self, phase: str | None) -> float:
        """Seconds a phase may take by the record; 0 where there is none."""
        return (self.longest or {}).get(phase or "", 0.0)

    def remaining(
        self, phase: str, elapsed: float, progress: float | None, reached: float | None = None, before: float = 0.0
    ) -> tuple[float | None, float | None]:
        """(seconds left of this phase, of the whole start); None: not known.

        `elapsed`: seconds into `phase`; `progress`: share of its bar, which was `reached` so many seconds into it;
        `before`: seconds from the start to the phase. The phase is taken to go on at the pace at which this start
        reached that share, against the recorded one; later phases at half that difference (as a ratio: its root).
        """
        phases = self.with_phase(phase)
        if not phases:
            return rate_only(elapsed if reached is None else reached, progress), None
        at = [known.phase for known in phases].index(phase)
        known = phases[at]
        share_at = _seconds_at(known.curve, progress) if progress is not None and known.curve else 0.0
        pace = _pace(elapsed if reached is None else reached, share_at) if share_at > 0 else 1.0
        left = max(known.seconds * pace - elapsed, 0.0)
        recorded = sum(one.seconds for one in phases[:at]) + (share_at if share_at > 0 else 0.0)
        spent = before + ((elapsed if reached is None else reached) if share_at > 0 else 0.0)
        later = sum(one.seconds for one in phases[at + 1 :])
        return left, left + later * math.sqrt(_pace(spent, recorded) if recorded > 0 else 1.0)


def _pace(seconds: float, recorded: float) -> float:
    """How much slower than recorded, within what is trusted."""
    return min(max(seconds / recorded, RATIO[0]), RATIO[1])


def rate_only(elapsed: float, progress: float | None) -> float | None:
    """Seconds left of a phase by its bar alone: for want of a record."""
    if progress is None or not 0 < progress <= 1 or elapsed <= 0:
        return None
    return elapsed * (1 - progress) / progress


def _seconds_at(curve: Sequence[tuple[float, float]], share: float) -> float:
    """Recorded seconds at which a share was reached, between the recorded points."""
    before = (0.0, 0.0)
    for point in curve:
        if point[0] >= share:
            width = point[0] - before[0]
            return point[1] if width <= 0 else before[1] + (point[1] - before[1]) * (share - before[0]) / width
        before = point
    return before[1]


def start_key(*, model: str, engine: str, argv: Sequence[str]) -> dict[str, str]:
    """What a start's duration depends on: model, engine with release, machine, flags without addresses."""
    here = machine()
    flags, skip = [], False
    for word in argv[1:]:
        name = word.partition("=")[0]
        if not skip and name not in PLACE_FLAGS:
            flags.append(word)
        skip = word in PLACE_FLAGS
    hardware = f"{here['processor']} x{here['cores']}, {here['memory_gb']:.0f} GB"
    return {"model": model, "engine": engine, "machine": hardware, "flags": hash_json(flags)[:16]}


def record_start(key: Mapping[str, str], phases: Iterable[PhaseTime], path: Path | None = None) -> None:
    """Append one start. One write of one line: two starts at once do not mix, a cut line is passed over."""
    path = path or cache_folder() / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"key": dict(key), "phases": [[one.phase, round(one.seconds, 3), one.curve] for one in phases]}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(body) + "\n").encode())
    finally:
        os.close(descriptor)


def expect(key: Mapping[str, str], path: Path | None = None) -> Expectation:
    """What the recorded starts say: those under the same flags, else of the same model, engine and machine."""
    records = _read(path or cache_folder() / FILE)
    same = [record for record in records if record[0] == dict(key)]
    if same:
        return _expectation(same[-KEPT:], f"{min(len(same), KEPT)} recorded start(s) under the same flags")
    like = [record for record in records if all(record[0].get(k) == v for k, v in key.items() if k != "flags")]
    if like:
        older = tuple(phases for _, phases in reversed(like[-KEPT:-1]))
        return replace(_expectation(like[-1:], "a recorded start under other flags"), older=older)
    return Expectation()


def _expectation(records: Sequence[tuple[dict[str, str], tuple[PhaseTime, ...]]], source: str) -> Expectation:
    """Order and curves of each start, the latest first, seconds the median of all, the longest of each phase."""
    times: dict[str, list[float]] = {}
    for _, phases in records:
        for one in phases:
            times.setdefault(one.phase, []).append(one.seconds)
    latest, *older = (tuple(_scaled(one, median(times[one.phase])) for one in phases) for _, phases in records[::-1])
    return Expectation(latest, {name: max(seconds) for name, seconds in times.items()}, source, tuple(older))


def _scaled(one: PhaseTime, seconds: float) -> PhaseTime:
    """A phase as it would be had it taken `seconds`."""
    scale = seconds / one.seconds if one.seconds > 0 else 1.0
    return PhaseTime(one.phase, seconds, tuple((share, at * scale) for share, at in one.curve))


def _read(path: Path) -> list[tuple[dict[str, str], tuple[PhaseTime, ...]]]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [record for line in lines if (record := _parse(line)) is not None]


def _parse(line: str) -> tuple[dict[str, str], tuple[PhaseTime, ...]] | None:
    try:
        raw: Any = json.loads(line)
        phases = tuple(
            PhaseTime(str(phase), float(seconds), tuple((float(share), float(at)) for share, at in curve))
            for phase, seconds, curve in raw["phases"]
        )
        return {str(k): str(v) for k, v in raw["key"].items()}, phases
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
