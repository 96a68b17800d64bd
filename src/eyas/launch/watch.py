"""Look at one server again and again: what is cheap each time, what costs in turns; decided by launch/state."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from eyas.clients.health import Prober
from eyas.launch.evidence import Evidence, Port, Processes, ProcessWatch, gpu_bytes, port_of
from eyas.launch.find import Found
from eyas.launch.gpus import Gpu, gpus
from eyas.launch.history import Expectation
from eyas.launch.log_state import LogReader, LogState
from eyas.launch.state import Memory, Status, decide

LOOK_S = 0.25
"""A death is told within a second: four looks a second, each of one small file and one line of /proc."""
TREE_S, GPU_S, PORT_S = 2.0, 2.0, 5.0
PROBE_S, READY_PROBE_S = 0.9, 5.0


UNSEEN = "it lives; neither its log nor its port is known, so how far it is cannot be told: add --log FILE or --url URL"


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 that go on evenly: a clock that is set, or a machine that slept, makes no silence."""
    began, at = time.time(), time.monotonic()
    return lambda: began + time.monotonic() - at


@dataclass
class Turn:
    """Something that is looked at every so often."""

    every_s: float
    last: float = field(default=float("-inf"))

    def due(self, now: float) -> bool:
        if now - self.last < self.every_s:
            return False
        self.last = now
        return True


class Watch:
    """One server under watch: `look()` as often as wanted."""

    def __init__(
        self,
        found: Found,
        expected: Expectation | None = None,
        clock: Callable[[], float] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.found, self.expected, self.clock = found, expected or Expectation(), clock or steady_clock()
        begun = found.server.started if found.server is not None else found.created
        self.memory = memory or Memory(begun=begun)
        self.log: LogState | None = None
        self.gpus: list[Gpu] | None = None
        self.processes: Processes | None = None
        self._reader = None if found.log is None else LogReader(found.log)
        self._tree = None if found.pid is None else ProcessWatch(found.pid, found.created, found.folder)
        self._prober = None if found.url is None else Prober(found.url, PROBE_S)
        self._port: Port | None = None
        self._turns = {"tree": Turn(TREE_S), "gpus": Turn(GPU_S), "port": Turn(PORT_S)}
        self._has_gpus = True

    @property
    def pids(self) -> tuple[int, ...]:
        return () if self.processes is None else self.processes.pids

    def look(self) -> Status:
        """What is so now."""
        now = self.clock()
        self.processes = self._look_at_processes(now)
        if self._reader is not None:
            self.log = self._reader.poll()  # after the processes: a dead one's last words are in it
        if self._has_gpus and self._turns["gpus"].due(now):
            self.gpus = gpus()
            self._has_gpus = self.gpus is not None
        health = None
        if self._prober is not None and (self.processes is None or self.processes.alive):
            health = self._prober.poll(self._probe_every())
            self._look_at_port(now, health is not None and health.ready)
        seen = Evidence(now, self.log, self.processes, gpu_bytes(self.gpus), self._port, health)
        self.memory, status = decide(self.memory, seen, self.expected)
        if self._reader is None and self._prober is None and status.state not in ("crashed", "stopped"):
            status = replace(status, state="unknown", cause=None, evidence=None, notes=(*status.notes, UNSEEN))
        return status if status.engine is not None else replace(status, engine=self.found.engine)

    def refresh(self) -> None:
        """Let the next look see everything anew, whoever's turn it is."""
        for turn in self._turns.values():
            turn.last = float("-inf")

    def once(self) -> Status:
        """One look with a probe brought to its end."""
        self.refresh()
        if self._prober is not None:
            self._prober.wait()
        return self.look()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._prober is not None:
            self._prober.close()

    def _look_at_processes(self, now: float) -> Processes | None:
        if self._tree is None:
            return None
        if self.processes is None or self._turns["tree"].due(now):
            return self._tree.look()
        alive, ended = self._tree.alive()
        return replace(self.processes, alive=alive, exit=ended)

    def _probe_every(self) -> float:
        """Often while a start goes on, at once when the log says ready, seldom on a server that was."""
        if self.memory.ready_at is not None:
            return READY_PROBE_S
        return LOOK_S if self.log is not None and self.log.state == "ready" else PROBE_S

    def _look_at_port(self, now: float, answered: bool) -> None:
        """Whose the port is: asked in turns, and at once when something first answers."""
        first = answered and (self._port is None or not self._port.listening)
        if self._tree is None or not (self._turns["port"].due(now) or first):
            return
        parts = urlsplit(self.found.url or "")
        if parts.port is not None:
            self._port = port_of(parts.port, self.pids, parts.hostname or "127.0.0.1")
