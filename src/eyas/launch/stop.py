"""Stop a server's whole tree, then see that its port is free and its GPUs' memory is back."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from eyas.errors import InputError
from eyas.launch.evidence import port_of
from eyas.launch.gpus import Gpu, gpus
from eyas.launch.process import ASKED, SAME_START_S, Server, created_at, require_ours, tree
from eyas.run import write_atomic

GRACE_S = 20.0
"""After TERM: engines finish a round, free what they hold, and unlink shared memory."""
KILL_S = 5.0
FREE_S = 15.0
"""The driver gives memory back, and a port leaves the listeners, within this."""
TICK_S = 0.05
HELD_BYTES = 1 << 30
"""Memory in use from which a GPU counts as held."""


@dataclass(frozen=True)
class Doomed:
    """What is to be stopped: one tree, with its port where that is known."""

    pid: int
    created: float | None
    port: int | None = None
    host: str = "127.0.0.1"
    folder: Path | None = None

    @classmethod
    def of(cls, server: Server) -> "Doomed":
        """A server Eyas started."""
        return cls(server.pid, server.created, server.port, server.host, Path(server.folder))


def by_pid(pid: int) -> Doomed:
    """A process named by the person; its port is the first it listens on.

    Raises InputError for one that is not there, is not the person's own, or is this command or above it.
    """
    created = require_ours(pid)
    above = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    if pid in above or pid == 1:
        raise InputError(
            wanted="a server's pid", got=f"{pid}, under which this command runs", where="--pid", next="eyas watch --all"
        )
    ports = sorted(port for one in tree(pid) for port in listening(one))
    return Doomed(pid, created, ports[0] if ports else None)


def listening(process: psutil.Process) -> list[int]:
    """The TCP ports a process listens on."""
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return []
    return [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN and one.laddr]


def stop(doomed: Doomed, *, grace_s: float = GRACE_S, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """TERM to the root, after the grace KILL to the rest. Returns `stopped port_free gpus holders` and what it took.

    A pid that was taken by another process since is left alone.
    """
    victims = tree(doomed.pid) if _ours(doomed) else []
    if doomed.folder is not None:
        write_atomic(doomed.folder / ASKED, json.dumps({"time": time.time()}) + "\n")
    killed: list[int] = []
    if victims:
        say(f"asking {len(victims)} process(es) to stop")
        _signal([one for one in victims if one.pid == doomed.pid] or victims, signal.SIGTERM)
        left = _await_end(doomed, victims, grace_s)
        if left:
            say(f"{len(left)} still there after {grace_s:.0f} s: killing them")
            killed = [one.pid for one in left]
            _signal(left, signal.SIGKILL)
            left = _await_end(doomed, left, KILL_S)
    remaining = [one.pid for one in victims if _lives(one)]
    found, holders = await_free(doomed, [one.pid for one in victims])
    return {
        "stopped": not remaining,
        "port_free": None if doomed.port is None else not port_of(doomed.port, (), doomed.host).listening,
        "gpus": found,
        "holders": holders,
        "pids": [one.pid for one in victims],
        "killed": killed,
        "remaining": remaining,
    }


def _ours(doomed: Doomed) -> bool:
    """Whether the number still stands for what is to be stopped: the root, dead and not yet buried at the worst, or
    nobody any more, and its session goes on: ours alone, for a session's number is not given away while it lasts."""
    created = created_at(doomed.pid)
    if created is None:
        return doomed.folder is not None
    return doomed.created is None or abs(created - doomed.created) <= SAME_START_S


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for one in processes:
        try:
            one.send_signal(number)  # psutil compares creation times first: a pid taken again is not hit
            one.send_signal(signal.SIGCONT)  # a stopped process heeds no TERM
        except psutil.NoSuchProcess:
            continue


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _await_end(doomed: Doomed, victims: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Who is still there after `seconds`, new children among them. Once the root is gone the others are asked too."""
    deadline, asked = time.monotonic() + seconds, False
    left = victims
    while time.monotonic() < deadline:
        left = [one for one in victims if _lives(one)]
        if not left:
            return []
        if not asked and all(one.pid != doomed.pid for one in left):
            _signal(left, signal.SIGTERM)
            asked = True
        time.sleep(TICK_S)
    known = {one.pid for one in left}
    return left + [one for one in tree(doomed.pid) if one.pid not in known and _lives(one)]


def await_free(doomed: Doomed, pids: Sequence[int]) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]]]:
    """(GPUs, holders) once port and memory are back, or when waiting is over. GPUs None: no NVIDIA driver here."""
    deadline = time.monotonic() + FREE_S
    while True:
        found = gpus()
        holders = port_holders(doomed) + gpu_holders(found, pids)
        if not holders or time.monotonic() >= deadline or _others_only(holders, pids):
            return None if found is None else [gpu_words(gpu) for gpu in found], holders
        time.sleep(TICK_S * 4)


def _others_only(holders: Sequence[dict[str, Any]], pids: Sequence[int]) -> bool:
    """Whether waiting is vain: what holds is known and none of what was stopped."""
    return all(holder["pid"] is not None and holder["pid"] not in pids for holder in holders)


def port_holders(doomed: Doomed) -> list[dict[str, Any]]:
    if doomed.port is None:
        return []
    port = port_of(doomed.port, (), doomed.host)
    return [{"what": f"port {doomed.port}", "pid": port.pid, "name": port.name}] if port.listening else []


def gpu_holders(found: Sequence[Gpu] | None, pids: Sequence[int]) -> list[dict[str, Any]]:
    """Who holds a GPU's memory. Inside a container the driver's pids may be nobody's here; their names are None."""
    holders: list[dict[str, Any]] = []
    for gpu in found or ():
        if gpu.used < HELD_BYTES and not set(gpu.processes) & set(pids):
            continue
        what = f"GPU {gpu.index}: {gpu.used / 2**30:.1f} GiB"
        holders += [{"what": what, "pid": pid, "name": _name(pid)} for pid in gpu.processes or (None,)]
    return holders


def _name(pid: int | None) -> str | None:
    try:
        return None if pid is None else psutil.Process(pid).name()
    except psutil.Error:
        return None


def gpu_words(gpu: Gpu) -> dict[str, Any]:
    return {"index": gpu.index, "name": gpu.name, "used_bytes": gpu.used, "total_bytes": gpu.total}
