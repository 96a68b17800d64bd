"""Servers that somebody else started, or an earlier Eyas: found by pid, url or by looking at every process."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from eyas.clients.address import address
from eyas.errors import InputError
from eyas.launch.arguments import PORTS
from eyas.launch.evidence import port_of
from eyas.launch.process import SERVER, Server, read_server, require_ours

KEEPER = "eyas.launch.keeper"
WORDS: dict[str, tuple[str, ...]] = {
    "sglang": ("sglang.launch_server", "sglang::", "sglang/launch_server.py"),
    "vllm": ("vllm.entrypoints", "VLLM::", "bin/vllm"),
    "embedded": ("eyas.engine.server",),
    "llamacpp": ("llama-server", "llama_server"),
}
"""What stands in the command line (or the title it gave itself) of an engine's process."""
TITLE = "::"
LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


@dataclass(frozen=True)
class Found:
    """A server and where to look at it. None: not known."""

    pid: int | None = None
    created: float | None = None
    engine: str | None = None
    url: str | None = None
    log: Path | None = None
    folder: Path | None = None
    server: Server | None = None


def engine_of_words(words: Sequence[str]) -> str | None:
    """Which engine a command line starts, judged by its first words: later ones may be about another."""
    head = " ".join(words[:4])
    return next((engine for engine, marks in WORDS.items() if any(mark in head for mark in marks)), None)


def words_of(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def of_folder(folder: Path) -> Found:
    """A serve folder. Raises InputError where it is none."""
    server = read_server(folder)
    return Found(server.pid, server.created, server.engine, server.url, Path(server.log), Path(server.folder), server)


def of_pid(pid: int) -> Found:
    """A running process; its log is where its output goes, its port what its command line says.

    Raises InputError where there is no such process, or it is somebody else's.
    """
    created = require_ours(pid)
    words = words_of(pid)
    if KEEPER in words:
        return of_folder(Path(words[-1]))
    folder = _kept_in(pid)
    if folder is not None:
        return of_folder(folder)
    engine = engine_of_words(words)
    port = _port(words, engine)
    return Found(pid, created, engine, None if port is None else f"http://{_host(words)}:{port}", output_of(pid))


def of_url(url: str) -> Found:
    """Whoever serves `url`, as far as this machine shows it. Raises InputError for what is no address."""
    place = address(url)
    base = place.base
    if place.host not in LOCAL:
        return Found(url=base)
    holder = port_of(place.port, ()).pid
    if holder is None:
        return Found(url=base)
    found = of_pid(root_of(holder))
    return Found(found.pid, found.created, found.engine, base, found.log, found.folder, found.server)


def root_of(pid: int) -> int:
    """The topmost process above `pid` that is an engine's; `pid` itself where none is."""
    root = pid
    try:
        for parent in psutil.Process(pid).parents():
            if engine_of_words(words_of(parent.pid)) is not None:
                root = parent.pid
    except psutil.Error:
        pass
    return root


def all_servers() -> list[Found]:
    """Every engine on this machine that may be looked at, each by its root process."""
    engines = {pid for pid in psutil.pids() if engine_of_words(words_of(pid)) is not None and pid != os.getpid()}
    roots = {root_of(pid) for pid in engines}
    found = []
    for pid in sorted(roots):
        try:
            found.append(of_pid(pid))
        except InputError:
            continue  # it ended in between
    return found


def output_of(pid: int) -> Path | None:
    """The regular file that a process's stdout (or stderr) goes to."""
    for descriptor in (1, 2):
        link = Path(f"/proc/{pid}/fd/{descriptor}")
        try:
            if stat.S_ISREG(link.stat().st_mode):
                target = Path(link.readlink())
                return target if target.is_file() else None
        except OSError:
            continue
    return None


def _kept_in(pid: int) -> Path | None:
    """The serve folder of an engine whose parent is a keeper of Eyas."""
    try:
        parent = psutil.Process(pid).ppid()
    except psutil.Error:
        return None
    words = words_of(parent)
    folder = Path(words[-1]) if KEEPER in words else None
    return folder if folder is not None and (folder / SERVER).is_file() else None


def _flag(words: Sequence[str], flag: str) -> str | None:
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _port(words: Sequence[str], engine: str | None) -> int | None:
    said = _flag(words, "--port")
    if said is not None and said.isdigit():
        return int(said)
    if engine is None or TITLE in " ".join(words[:1]):
        return None  # a worker's title: the program that owns it may serve nothing
    return PORTS.get(engine, 8080 if engine == "llamacpp" else 8000)


def _host(words: Sequence[str]) -> str:
    said = _flag(words, "--host") or "127.0.0.1"
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "localhost": "127.0.0.1"}.get(said, said)
