"""Loading, stuck, dead or ready: one pure function from what is seen, and what was, to what is so.

    memory, status = decide(memory, evidence, expectation)

Order of belief: a process that is gone is gone whatever its log says; readiness is an HTTP status from the server's own
port, never a word in a body or a log; an error in the log of a process that still works is told, not believed; silence
counts only where nothing moves: no CPU time, no bytes read, no memory growing (the process's or the GPUs'), no line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from eyas.clients.health import Health
from eyas.launch import movement
from eyas.launch.evidence import Evidence, Processes
from eyas.launch.history import Expectation, PhaseTime
from eyas.launch.log_state import LogState
from eyas.launch.movement import PROBE_LINE, Mark
from eyas.launch.phases import ORDERS

State = Literal["starting", "loading", "warming", "ready", "stuck", "crashed", "stopped", "unknown"]
IDLE_S = 120.0
"""Nothing may move for so long past what history allows before a start is called stuck."""
FAILED_PROBES_S = 60.0
"""A ready server that moves nothing and answers no probe for so long is stuck."""
CURVE_POINTS = 200
STAMP_S = 2.0
WORKING = ("starting", "loading", "warming")


@dataclass(frozen=True)
class Memory:
    """What earlier looks leave behind."""

    begun: float | None = None
    """When the server was started, or first seen."""
    mark: Mark | None = None
    """At the last movement."""
    last: Mark | None = None
    """At the last look."""
    recent: tuple[Mark, ...] = ()
    """Of the last seconds: what moves now."""
    phases: tuple[tuple[str, float], ...] = ()
    """Phases in the order met, with when each began."""
    curve: tuple[tuple[float, float], ...] = ()
    """(share, seconds into the phase) of the present phase's bar."""
    curves: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    ready_at: float | None = None
    answered: float | None = None
    """When a probe last answered 200."""


@dataclass(frozen=True)
class Status:
    """What is so, and why. Field names are those of `eyas watch --json`."""

    engine: str | None
    state: State
    phase: str | None
    progress: float | None = None
    shards: tuple[int, int] | None = None
    rate: float | None = None
    """Shards a second in the present phase so far."""
    eta_s: float | None = None
    phase_eta_s: float | None = None
    eta_source: str | None = None
    cause: str | None = None
    evidence: str | None = None
    advice: str | None = None
    notes: tuple[str, ...] = ()
    elapsed_s: float | None = None
    idle_s: float | None = None
    moving: tuple[str, ...] = ()
    """What a server that starts does: cores busy, bytes read a second, memory growing."""


def decide(memory: Memory, seen: Evidence, expected: Expectation | None = None) -> tuple[Memory, Status]:
    """One look more: what to remember, and what is so. Pure; never `stuck` while anything moves."""
    expected = expected or Expectation()
    log, processes = seen.log or LogState(), seen.processes
    memory = _remember(memory, seen, log)
    notes = _notes(seen, processes)
    if processes is not None and not processes.alive:
        return memory, _dead(memory, seen, log, processes, notes)
    if _answers(seen):
        ready_at = seen.time if memory.ready_at is None else memory.ready_at
        memory = replace(memory, ready_at=ready_at, answered=seen.time)
        memory = _enter(memory, "ready", seen.time)
        return memory, _status(memory, seen, log, "ready", "ready", notes=notes)
    if processes is None:
        return memory, _by_log(memory, seen, log, notes)
    if memory.ready_at is not None:
        return memory, _was_ready(memory, seen, log, notes)
    return memory, _starting(memory, seen, log, expected, notes)


def _answers(seen: Evidence) -> bool:
    """Ready by status code, from the server's own port."""
    return seen.health is not None and seen.health.ready and (seen.port is None or seen.port.ours is not False)


def _dead(memory: Memory, seen: Evidence, log: LogState, processes: Processes, notes: tuple[str, ...]) -> Status:
    ended = processes.exit
    words = ended.words if ended is not None else "gone"
    clean = ended is not None and ended.clean and (ended.asked or log.state != "crashed")
    unknown_end = ended is None or (ended.code is None and ended.signal is None and ended.error is None)
    if unknown_end and log.state == "stopped":
        clean = True
    if clean:
        return _status(memory, seen, log, "stopped", log.phase, evidence=words, notes=notes)
    killed = ended is not None and ended.signal == 9
    oom = ended is not None and ended.oom is True
    if oom and (killed or log.cause is None):
        cause, advice = "host_oom", "more memory, fewer ranks reading weights at once, or a smaller or quantised target"
        return _status(memory, seen, log, "crashed", log.phase, cause, words, advice, notes)
    if log.cause is not None:
        return _status(memory, seen, log, "crashed", log.phase, log.cause, log.evidence, log.advice, (*notes, words))
    cause = "killed" if killed else "exited"
    advice = (
        "who sent the signal? `dmesg | grep -i kill` tells of the kernel's own"
        if killed
        else "read the last lines of the log; they name no cause that is known here"
    )
    last = next((line for line in reversed(log.last_lines) if line.strip() and not PROBE_LINE.search(line)), None)
    if last is not None:
        notes = (*notes, f"last line: {last}")
    return _status(memory, seen, log, "crashed", log.phase, cause, words, advice, notes)


def _by_log(memory: Memory, seen: Evidence, log: LogState, notes: tuple[str, ...]) -> Status:
    """No process to look at: the log as of its last line, corrected by what the port answers."""
    state: str = log.state
    if seen.health is not None:
        if state == "ready":
            state = "warming"
            notes = (*notes, f"the log says ready, {seen.health.words} does not")
        elif seen.log is None:
            state = "warming" if seen.health.status == 503 else "unknown"
            return _status(memory, seen, log, _state(state), None, evidence=seen.health.words, notes=notes)
    return _status(memory, seen, log, _state(state), log.phase, log.cause, log.evidence, log.advice, notes)


def _was_ready(memory: Memory, seen: Evidence, log: LogState, notes: tuple[str, ...]) -> Status:
    """A server that was ready and does not answer now: busy, or stuck."""
    silent = seen.time - (seen.time if memory.answered is None else memory.answered)
    idle = _idle(memory, seen)
    words = seen.health.words if seen.health is not None else "no probe yet"
    if seen.health is not None and silent >= FAILED_PROBES_S and idle >= FAILED_PROBES_S:
        advice = log.advice or "eyas stop, then serve again"
        cause, words = log.cause or "no_answer", log.evidence or words
        return _status(memory, seen, log, "stuck", "ready", cause, words, advice, notes)
    if silent > 0 and seen.health is not None:
        notes = (*notes, f"{words} for {silent:.0f} s, while it works" if idle < 5 else f"{words} for {silent:.0f} s")
    return _status(memory, seen, log, "ready", "ready", notes=notes)


def _starting(memory: Memory, seen: Evidence, log: LogState, expected: Expectation, notes: tuple[str, ...]) -> Status:
    state, phase, idle = log.state, log.phase, _idle(memory, seen)
    if state == "ready":  # a word in a log: believed once the port answers, or where no port is known to ask
        if seen.health is None and seen.port is None:
            return _status(memory, seen, log, "ready", "ready", notes=notes)
        state, phase = "warming", _last_phase(log)
        if seen.health is not None:
            notes = (*notes, f"the log says ready, {seen.health.words} does not")
    elif state == "crashed":
        notes = (*notes, f"the log shows an error and the process lives: {log.evidence}")
        state = "loading"
    elif state not in WORKING:
        state = "starting"
    if (health := seen.health) is not None and log.state != "ready" and _no_start(health):
        notes = (*notes, f"{health.words}: a server that starts refuses or answers 503")
    elapsed = seen.time - _phase_start(memory, phase or "args", seen.time)
    if idle >= IDLE_S and elapsed >= expected.allowed(phase) + IDLE_S:
        words = f"nothing moved for {idle:.0f} s: no line, no CPU time, nothing read, no memory growing"
        advice = log.advice or "eyas stop, then look where it stands (py-spy dump); a rank that waits for another one?"
        if seen.processes is not None and seen.processes.zombies:
            words += f"; child {seen.processes.zombies[0]} is dead and not buried"
        cause, words = log.cause or "no_progress", log.evidence or words
        return _status(memory, seen, log, "stuck", phase, cause, words, advice, notes)
    reached = memory.curve[-1][1] if memory.curve else None
    before = seen.time - elapsed - (seen.time if memory.begun is None else memory.begun)
    left, whole = expected.remaining(phase or "args", elapsed, log.progress, reached, max(before, 0.0))
    status = _status(memory, seen, log, _state(state), phase, notes=notes)
    rate = log.shards[0] / reached if log.shards is not None and reached else None
    moving = movement.words(memory.recent[0], memory.recent[-1])
    source = expected.says(phase or "args")
    return replace(status, eta_s=whole, phase_eta_s=left, eta_source=source, rate=rate, moving=moving)


def _last_phase(log: LogState) -> str:
    """What a start does last, before its port answers: each engine in its own order."""
    return "warmup" if log.engine is None else ORDERS[log.engine][-2]


def _no_start(health: Health) -> bool:
    """Whether a port answers as no starting server does: with another protocol, or another status."""
    if health.status is None:
        return not (health.error or "").startswith("Connect")
    return health.status not in (200, 503)


def _state(word: str) -> State:
    states: dict[str, State] = {
        "starting": "starting",
        "loading": "loading",
        "warming": "warming",
        "ready": "ready",
        "stuck": "stuck",
        "crashed": "crashed",
        "stopped": "stopped",
    }
    return states.get(word, "unknown")


def _status(
    memory: Memory,
    seen: Evidence,
    log: LogState,
    state: State,
    phase: str | None,
    cause: str | None = None,
    evidence: str | None = None,
    advice: str | None = None,
    notes: tuple[str, ...] = (),
) -> Status:
    working = state in WORKING or state == "stuck"
    return Status(
        engine=log.engine,
        state=state,
        phase=phase,
        progress=log.progress if working else None,
        shards=log.shards if working else None,
        cause=cause,
        evidence=evidence,
        advice=advice,
        notes=notes,
        elapsed_s=_elapsed(memory, seen, log),
        idle_s=_idle(memory, seen) if seen.processes is not None else None,
    )


def _elapsed(memory: Memory, seen: Evidence, log: LogState) -> float | None:
    """Seconds since the start: until now, until a dead server's end, and of a log alone until its last line."""
    if memory.begun is None:
        return None
    until, processes = seen.time, seen.processes
    if processes is not None and not processes.alive and processes.exit is not None:
        until = processes.exit.time or until
    elif processes is None and seen.health is None and seen.log is not None:
        if log.last_time is None or not any(log.phase_starts.values()):
            return None
        until = log.last_time.timestamp()
    return max(until - memory.begun, 0.0)


def _notes(seen: Evidence, processes: Processes | None) -> tuple[str, ...]:
    notes = []
    if seen.port is not None and seen.port.listening and seen.port.ours is False:
        notes.append(seen.port.words)
    if seen.log is not None and seen.log.note is not None:
        notes.append(seen.log.note)
    if processes is not None and processes.alive:
        if processes.zombies:
            notes.append(f"dead children not yet buried: {', '.join(map(str, processes.zombies))}")
        if processes.halted:
            listed = " ".join(map(str, processes.halted))
            notes.append(f"stopped by a signal (SIGSTOP, Ctrl-Z), not by an error; to go on: kill -CONT {listed}")
        if processes.disk_wait:
            notes.append("a process waits for the disk")
    return tuple(notes)


def _remember(memory: Memory, seen: Evidence, log: LogState) -> Memory:
    now = movement.mark(seen, log, memory.last)
    moves = True
    if memory.last is not None and memory.mark is not None:
        moves = movement.moved(memory.last, now) or movement.moved(memory.mark, now) or movement.wrote(memory.last, log)
    memory = replace(
        memory,
        begun=memory.begun if memory.begun is not None else _first(log, seen.time),
        mark=now if moves else memory.mark,
        last=now,
        recent=movement.recent(memory.recent, now),
    )
    if seen.processes is not None and not memory.phases and log.phase in (None, "args") and memory.begun is not None:
        memory = _enter(memory, "args", memory.begun)  # the seconds before a first line are part of a start too
    if log.phase is not None and memory.ready_at is None:
        for phase in [*log.phase_starts, log.phase]:
            if phase != "ready":
                memory = _enter(memory, phase, _began(log.phase_starts.get(phase), memory.begun, seen.time))
        if log.progress is not None and (not memory.curve or log.progress > memory.curve[-1][0]):
            began = memory.phases[-1][1]
            points = (*memory.curve, (log.progress, max(seen.time - began, 0.0)))
            memory = replace(memory, curve=points[-CURVE_POINTS:])
    return memory


def _enter(memory: Memory, phase: str, when: float) -> Memory:
    """Begin a phase, unless it was met before: a second look at an old phase does not rewind."""
    if any(name == phase for name, _ in memory.phases):
        return memory
    curves = dict(memory.curves)
    if memory.phases and memory.curve:
        curves[memory.phases[-1][0]] = memory.curve
    when = max(when, memory.phases[-1][1] if memory.phases else when)
    return replace(memory, phases=(*memory.phases, (phase, when)), curve=(), curves=curves)


def _idle(memory: Memory, seen: Evidence) -> float:
    return 0.0 if memory.mark is None else max(seen.time - memory.mark.time, 0.0)


def _phase_start(memory: Memory, phase: str, now: float) -> float:
    for name, when in memory.phases:
        if name == phase:
            return when
    return memory.begun if memory.begun is not None else now


def _first(log: LogState, now: float) -> float:
    """When a server began whose start was not seen: by its log's first stamp."""
    stamps = [stamp.timestamp() for stamp in log.phase_starts.values() if stamp is not None]
    return min([now, *stamps])


def _began(stamp: datetime | None, begun: float | None, now: float) -> float:
    """When a phase began: by the line's stamp where it was met late, else now (stamps are to the second).

    A stamp from before the start is of another clock, or another zone.
    """
    then = now if stamp is None else stamp.timestamp()
    late = now - then > STAMP_S
    return then if late and (begun is None or then >= begun - STAMP_S) else now


def phase_times(memory: Memory, end: float) -> tuple[PhaseTime, ...]:
    """Each phase's seconds, up to `end` (when the server was ready), for history and `serve --json`."""
    curves = {**memory.curves, **({memory.phases[-1][0]: memory.curve} if memory.phases and memory.curve else {})}
    starts = [*memory.phases, ("", end)]
    return tuple(
        PhaseTime(name, max(starts[index + 1][1] - when, 0.0), curves.get(name, ()))
        for index, (name, when) in enumerate(memory.phases)
        if name != "ready"
    )
