"""`python -m eyas.launch.keeper FOLDER`: runs one engine, keeps its log and its end. Standard library only.

A process of its own, so that the log is written and the exit status kept whether or not Eyas still runs.

    FOLDER/launch.json   read: argv, env (added), cwd
    FOLDER/started.json  pid of the engine (leader of a session and process group of its own), time
    FOLDER/engine.log    its stdout and stderr; each line, and each update of a bar, begins with the time it came
    FOLDER/exit.json     code, signal, time, whether the kernel killed for memory; or `error`, where it could not start
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from eyas.launch.kernel import oom_killed, oom_kills

LAUNCH, STARTED, LOG, EXIT = "launch.json", "started.json", "engine.log", "exit.json"
ENDS = re.compile(rb"\r\n|\n|\r")
TICK_S = 0.1
DRAIN_S = 2.0
"""Output still in the pipe after the engine's end is read so long: a grandchild may hold it open for ever."""


def stamp(now: float) -> bytes:
    """Local time, as the engines' own lines have it."""
    return datetime.fromtimestamp(now).isoformat(timespec="milliseconds").encode() + b" "


class StampedLog:
    """Lines as they come, each under the time of its first byte; a line is written as it grows, not when it ends."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.open_line = False
        self.after_return = False
        self.lost = 0
        """Bytes that could not be written."""

    def write(self, block: bytes, now: float) -> None:
        """Append `block`. A carriage return alone ends a line, so that each state of a bar has its time."""
        if self.after_return and block.startswith(b"\n"):
            block = block[1:]
        self.after_return = block.endswith(b"\r")
        pieces = []
        for index, piece in enumerate(ENDS.split(block)):
            if index:
                pieces.append(b"\n" if self.open_line else b"")
                self.open_line = False
            if piece:
                pieces.append(piece if self.open_line else stamp(now) + piece)
                self.open_line = True
        try:
            self.file.write(b"".join(pieces))
        except OSError:  # disk full: the engine must not die of its log
            self.lost += len(block)


def write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def keep(folder: Path) -> int:
    """Start what `launch.json` says, keep its log until it ends, write how it ended."""
    launch = json.loads((folder / LAUNCH).read_text())
    before = oom_kills(os.getpid())
    try:
        child = subprocess.Popen(
            launch["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | launch["env"],
            cwd=launch["cwd"],
            start_new_session=True,
        )
    except OSError as error:
        write_json(folder / EXIT, {"error": str(error), "time": time.time()})
        return 2
    write_json(folder / STARTED, {"pid": child.pid, "keeper": os.getpid(), "time": time.time()})
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    with (folder / LOG).open("ab", buffering=0) as file:
        log = StampedLog(file)
        _follow(child, log, lambda: _write_exit(folder, child, before, log.lost))
    return 0


def _follow(child: "subprocess.Popen[bytes]", log: StampedLog, ended: Any) -> None:
    assert child.stdout is not None, "stdout is a pipe"
    os.set_blocking(child.stdout.fileno(), False)
    dead_at: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        open_pipe = True
        while open_pipe or dead_at is None:
            if open_pipe and selector.select(TICK_S):
                block = os.read(child.stdout.fileno(), 1 << 16)
                open_pipe = bool(block)
                log.write(block, time.time())
            elif not open_pipe:
                time.sleep(TICK_S)
            if dead_at is None and child.poll() is not None:
                dead_at = time.monotonic()
                _drain(child.stdout.fileno(), log)  # its last words are in the log before its end is told
                ended()
            if dead_at is not None and time.monotonic() - dead_at > DRAIN_S:
                return


def _drain(descriptor: int, log: StampedLog) -> None:
    """What the pipe holds now."""
    try:
        while block := os.read(descriptor, 1 << 16):
            log.write(block, time.time())
    except BlockingIOError:
        return


def _write_exit(folder: Path, child: "subprocess.Popen[bytes]", before: int | None, lost: int) -> None:
    code = child.returncode
    after = oom_kills(os.getpid())
    grew = None if before is None or after is None else after > before
    killed = code == -signal.SIGKILL and oom_killed(child.pid)
    end = {
        "code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "time": time.time(),
        "oom": True if grew or killed else grew,
        "log_bytes_lost": lost,
    }
    write_json(folder / EXIT, end)


if __name__ == "__main__":
    for unheeded in (signal.SIGINT, signal.SIGHUP):  # a handler, unlike SIG_IGN, is not inherited by the engine
        signal.signal(unheeded, lambda *_: None)
    if os.fork():
        os._exit(0)  # whoever started the keeper need not reap it
    sys.exit(keep(Path(sys.argv[1])))
