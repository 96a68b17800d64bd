"""The parent's side of a worker: started once, asked prompt by prompt, standing still while another computes."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

JSON = dict[str, Any]
START_S, ANSWER_S, END_S = 1800.0, 300.0, 20.0


class WorkerError(Exception):
    """A worker that did not start, died, or kept silent: the reason that voids its row."""


class Worker:
    """A process that speaks lines of JSON (worker.py). It and its children are stopped (SIGSTOP) between answers, so
    that threads that spin for work cost nobody else a core.

    Raises WorkerError where it does not become ready.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.selector, self.unread = selectors.DefaultSelector(), b""
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        try:
            first = self._read(START_S)
            if "ready" not in first:
                raise WorkerError(first.get("error", f"no readiness but {first}"))
        except WorkerError:
            self.stop()
            raise
        self.facts: JSON = first["ready"]
        self._signal(signal.SIGSTOP)

    def ask(self, ids: Sequence[int], max_tokens: int) -> JSON:
        """The answer to one prompt, with `seconds_wall` as seen from here. Raises WorkerError."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        started = time.perf_counter()
        try:
            self.process.stdin.write(json.dumps({"ids": list(ids), "max_tokens": max_tokens}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(self._death()) from error
        answer = self._read(ANSWER_S)
        self._signal(signal.SIGSTOP)
        return {**answer, "seconds_wall": time.perf_counter() - started}

    def stop(self) -> None:
        """End it and its children."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # it may be gone already
            self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()
        self._signal(signal.SIGKILL)
        self.selector.close()
        self.process.stdout.close()

    def _read(self, seconds: float) -> JSON:
        assert self.process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self.unread:
            if not self.selector.select(max(0.0, until - time.monotonic())):
                self._signal(signal.SIGKILL)
                raise WorkerError(f"no answer in {seconds:.0f} s; its log is {self.log}")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise WorkerError(self._death())
            self.unread += data
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def _death(self) -> str:
        status = self.process.wait()
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["nothing in its log"]
        return f"it ended with {status}: {lines[-1][:300]} ({self.log})"

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all of the group may have ended
            os.killpg(self.process.pid, number)
