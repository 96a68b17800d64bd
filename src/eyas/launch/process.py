"""An engine as a process of ours: started under a keeper that outlives us, found again, and its end explained."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from eyas.errors import InputError
from eyas.launch.command import Command
from eyas.launch.keeper import EXIT, LAUNCH, LOG, STARTED
from eyas.run import write_atomic

SERVER = "server.json"
PREVIOUS = "engine.previous.log"
ASKED = "stop.json"
"""Written by whoever asks the server to stop, before asking."""
START_S = 20.0
"""The keeper writes the engine's pid within this, on however loaded a machine."""
SAME_START_S = 2.0
"""A process's creation time is known to a clock tick; a number taken again is later by far more."""


KILLED = {
    True: " by the kernel, for lack of memory",
    False: ", not by the kernel for memory",
    None: ": by a person, or by the kernel for memory (its record may not be read here)",
}


class Server(BaseModel):
    """A server Eyas started, as its folder's server.json says. `created` guards against a pid that was taken again."""

    model_config = ConfigDict(frozen=True)

    folder: str
    engine: str
    url: str
    host: str
    port: int
    pid: int
    pgid: int
    created: float
    keeper: int
    log: str
    argv: tuple[str, ...]
    target: str
    draft: str | None
    started: float
    """Seconds since 1970."""
    key: dict[str, str]
    """What its start-up history is kept under (launch/history)."""

    @property
    def exit(self) -> "Exit | None":
        return read_exit(Path(self.folder))


@dataclass(frozen=True)
class Exit:
    """How a process ended. None: not known (a process of somebody else's)."""

    code: int | None = None
    signal: int | None = None
    time: float | None = None
    oom: bool | None = None
    """Whether the kernel killed for memory while it ran."""
    error: str | None = None
    asked: bool = False
    """Whether `eyas stop` or Ctrl-C of `eyas serve` asked for it."""

    @property
    def clean(self) -> bool:
        """By its own decision, or asked to."""
        return self.asked or self.code == 0 or self.signal in (signal.SIGTERM, signal.SIGINT)

    @property
    def words(self) -> str:
        """For people: which signal, which code, and the kernel's part in it."""
        if self.error is not None:
            return f"could not be started: {self.error}"
        if self.signal is not None:
            name = signal.Signals(self.signal).name if self.signal in set(signal.Signals) else "unknown"
            words = f"killed by signal {self.signal} ({name})"
            if self.signal == signal.SIGKILL:
                words += KILLED[self.oom]
            return words
        if self.code is None:
            return "gone; its exit status is not ours to read"
        killed = "; the kernel killed a process of it for lack of memory" if self.oom and self.code else ""
        return f"exit code {self.code}{killed}"


def read_exit(folder: Path) -> Exit | None:
    """How the engine of a serve folder ended; None while it runs."""
    path = folder / EXIT
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    asked = (folder / ASKED).exists()
    return Exit(*(found.get(name) for name in ("code", "signal", "time", "oom", "error")), asked=asked)


def start(command: Command, folder: Path, key: dict[str, str]) -> Server:
    """Start `command` under a keeper, in a session of its own; returns once its pid is known.

    Raises InputError where a server of this folder still runs, or the program cannot be started.
    """
    folder = folder.absolute()
    _refuse_running(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / LOG).exists():
        (folder / LOG).replace(folder / PREVIOUS)
    for name in (SERVER, STARTED, EXIT, ASKED):
        (folder / name).unlink(missing_ok=True)
    (folder / LOG).touch()
    launch = {"argv": list(command.argv), "env": dict(command.env), "cwd": str(Path.cwd())}
    write_atomic(folder / LAUNCH, json.dumps(launch, indent=1) + "\n")
    with (folder / "keeper.log").open("wb") as errors:
        subprocess.run(
            [sys.executable, "-m", "eyas.launch.keeper", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            check=False,
        )
    started = _await_start(folder)
    pid = started["pid"]
    server = Server(
        folder=str(folder),
        engine=command.engine,
        url=command.url,
        host=command.host,
        port=command.port,
        pid=pid,
        pgid=pid,
        created=created_at(pid) or started["time"],
        keeper=started["keeper"],
        log=str(folder / LOG),
        argv=command.argv,
        target=command.target,
        draft=command.draft,
        started=started["time"],
        key=key,
    )
    write_atomic(folder / SERVER, server.model_dump_json(indent=1) + "\n")
    return server


def _await_start(folder: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (folder / STARTED).exists():
            return json.loads((folder / STARTED).read_text())
        ended = read_exit(folder)
        if ended is not None:
            raise InputError(wanted="the engine's program", got=ended.words, where=str(folder), next="--python FILE")
        time.sleep(0.01)
    said = (folder / "keeper.log").read_text(errors="replace")[-400:]
    raise InputError(
        wanted=f"a process within {START_S:.0f} s", got=said or "none", where=str(folder), next="the same command again"
    )


def _refuse_running(folder: Path) -> None:
    if (folder / SERVER).is_file():
        running = read_server(folder)
        if is_same(running.pid, running.created):
            raise InputError(
                wanted="a folder without a running server",
                got=f"pid {running.pid} serving {running.url}",
                where=str(folder),
                next=f"eyas stop {folder}, or another --out",
            )


def read_server(folder: Path) -> Server:
    """The server of a serve folder. Raises InputError where there is none."""
    path = folder / SERVER
    try:
        return Server.model_validate_json(path.read_text())
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise InputError(
            wanted=f"a folder that `eyas serve` wrote (one with {SERVER})",
            got="no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())[:200],
            where=str(path),
            next="eyas watch --all lists what runs",
        ) from error


def created_at(pid: int) -> float | None:
    """When a process was created, seconds since 1970; None for one that is gone."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def is_same(pid: int, created: float | None) -> bool:
    """Whether `pid` is alive (a zombie is not) and still the process created then."""
    try:
        process = psutil.Process(pid)
        fresh = created is None or abs(process.create_time() - created) <= SAME_START_S
        return fresh and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def require_ours(pid: int) -> float:
    """When a running process of this user was created. Raises InputError for one that is gone, or another user's:
    what it reads and where its output goes cannot be seen."""
    try:
        process = psutil.Process(pid)
        created, owner, name = process.create_time(), process.uids().effective, process.username()
    except (psutil.Error, ValueError, OverflowError) as error:  # psutil takes no number below 0 or beyond an int
        raise InputError(
            wanted="a running process", got=f"no process {pid}", where="--pid", next="eyas watch --all lists what runs"
        ) from error
    if os.geteuid() not in (0, owner):
        raise InputError(
            wanted="a process of yours", got=f"one of {name}", where=f"pid {pid}", next=f"the same command as {name}"
        )
    return created


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; where it leads a session (as ours do), all of that session, orphans too."""
    found: dict[int, psutil.Process] = {}
    try:
        root = psutil.Process(pid)
        found[pid] = root
        found |= {child.pid: child for child in root.children(recursive=True)}
    except psutil.Error:
        pass
    for process in _session(pid):
        found.setdefault(process.pid, process)
    return [process for process in found.values() if process.pid != os.getpid()]


def _session(leader: int) -> Sequence[psutil.Process]:
    """Processes whose session is `leader`'s. While one is left, the kernel gives the number to nobody else."""
    members = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader:
                members.append(psutil.Process(pid))
        except (OSError, psutil.Error):
            continue
    return members
