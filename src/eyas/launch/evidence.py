"""What can be seen of a server from outside: its processes, the GPUs, its port, its health, its log."""

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from eyas.clients.health import Health
from eyas.launch.gpus import Gpu
from eyas.launch.log_state import LogState
from eyas.launch.process import Exit, is_same, read_exit, tree

STACK_S = 15.0
KEEPER_S = 0.5
LIST_S = 10.0


@dataclass(frozen=True)
class Processes:
    """The tree of one server. Sums only grow: what ended processes used stays in them."""

    alive: bool
    exit: Exit | None = None
    pids: tuple[int, ...] = ()
    zombies: tuple[int, ...] = ()
    cpu_s: float = 0.0
    read_bytes: int = 0
    resident: int = 0
    """Bytes of memory held; mapped weights count as they are touched."""
    halted: tuple[int, ...] = ()
    """Those that a signal stopped (SIGSTOP, Ctrl-Z): they go on at SIGCONT."""
    disk_wait: bool = False
    """Whether one of them is in uninterruptible sleep."""


@dataclass(frozen=True)
class Port:
    """Who listens on the server's port. `ours` None: something listens, whose is not known."""

    number: int
    listening: bool
    ours: bool | None = None
    pid: int | None = None
    name: str | None = None

    @property
    def words(self) -> str:
        """Who holds the port, for people."""
        who = f"pid {self.pid} ({self.name})" if self.pid is not None else "another process"
        return f"port {self.number} is answered by {who}, not by this server"


@dataclass(frozen=True)
class Evidence:
    """One look. None: not looked at, or not to be had."""

    time: float
    """Seconds since 1970."""
    log: LogState | None = None
    processes: Processes | None = None
    gpu_bytes: int | None = None
    port: Port | None = None
    health: Health | None = None


class ProcessWatch:
    """The process tree of one pid, looked at again and again."""

    def __init__(self, pid: int, created: float | None = None, folder: Path | None = None) -> None:
        self.pid, self.created, self.folder = pid, created, folder
        self._spent: dict[tuple[int, float], tuple[float, int]] = {}
        self._known: list[psutil.Process] = []
        self._listed = float("-inf")

    def alive(self) -> tuple[bool, Exit | None]:
        """Cheap: whether the root lives, and how it ended where that is known."""
        ended = read_exit(self.folder) if self.folder is not None else None
        if ended is not None:
            return False, ended
        if is_same(self.pid, self.created):
            return True, None
        return False, self._last_words()

    def _members(self) -> list[psutil.Process]:
        """The tree; listing it reads every process of the machine, so it is listed anew only so often."""
        if time.monotonic() - self._listed >= LIST_S:
            self._known, self._listed = tree(self.pid), time.monotonic()
        return self._known

    def _last_words(self) -> Exit:
        """How it ended; the keeper writes that down a moment after."""
        deadline = time.monotonic() + KEEPER_S
        while self.folder is not None and time.monotonic() < deadline:
            if (ended := read_exit(self.folder)) is not None:
                return ended
            time.sleep(0.02)
        return Exit()

    def look(self) -> Processes:
        """The whole tree: CPU seconds, bytes read, memory, zombies."""
        alive, ended = self.alive()
        pids, zombies, halted, resident, waiting = [], [], [], 0, False
        for process in self._members():
            try:
                with process.oneshot():
                    status = process.status()
                    if status == psutil.STATUS_ZOMBIE:
                        zombies.append(process.pid)
                        continue
                    cpu = process.cpu_times()
                    resident += process.memory_info().rss
                    read = process.io_counters().read_bytes if psutil.LINUX else 0
                    key = process.pid, process.create_time()
            except psutil.NoSuchProcess:
                continue
            except psutil.AccessDenied:
                pids.append(process.pid)
                continue
            pids.append(process.pid)
            if status == psutil.STATUS_STOPPED:
                halted.append(process.pid)
            waiting = waiting or status == psutil.STATUS_DISK_SLEEP
            self._spent[key] = (cpu.user + cpu.system, read)
        cpu_s = sum(seconds for seconds, _ in self._spent.values())
        read_bytes = sum(read for _, read in self._spent.values())
        return Processes(alive, ended, tuple(pids), tuple(zombies), cpu_s, read_bytes, resident, tuple(halted), waiting)


def port_of(number: int, pids: Sequence[int], host: str = "127.0.0.1") -> Port:
    """Who listens on `number` for `host`: a process of `pids`, another one, nobody.

    Another user's process is seen to listen; who it is, is not.
    """
    holders = [pid for pid, address in _listeners(number, pids) if _covers(address, host)]
    if not holders:
        return Port(number, False)
    known = [pid for pid in holders if pid is not None]
    mine = [pid for pid in known if pid in set(pids)]
    if mine:
        return Port(number, True, True, mine[0], _name(mine[0]))
    return Port(number, True, False, known[0], _name(known[0])) if known else Port(number, True)


def _listeners(number: int, pids: Sequence[int]) -> list[tuple[int | None, str]]:
    """(pid, address) of each listener on a port; without the right to see all, of `pids` only."""
    try:
        seen = [(one.pid, one) for one in psutil.net_connections(kind="tcp")]
    except psutil.AccessDenied:
        seen = [(pid, one) for pid in pids for one in psutil.Process(pid).net_connections(kind="tcp")]
    return [
        (pid, one.laddr.ip)
        for pid, one in seen
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == number
    ]


def _covers(address: str, host: str) -> bool:
    """Whether a listener on `address` would answer for `host`."""
    everywhere, loopback = {"0.0.0.0", "::"}, {"127.0.0.1", "localhost", "::1"}
    return address in everywhere or host in everywhere or address == host or {address, host} <= loopback


def _name(pid: int) -> str | None:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None


def gpu_bytes(found: Sequence[Gpu] | None) -> int | None:
    """Memory in use over all GPUs. Pids in a container are not the driver's, so nothing is told apart."""
    return None if found is None else sum(gpu.used for gpu in found)


def stack(pid: int) -> str | None:
    """Where a Python process stands, by py-spy; None where py-spy is not there or may not look."""
    program = shutil.which("py-spy")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, timeout=STACK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
