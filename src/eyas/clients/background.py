"""Slow questions asked in a thread of their own, one at a time, so that whoever watches never waits."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")
JOIN_S = 10.0


class Background(Generic[Answer]):
    """`work` again and again: `poll` gives the latest answer and asks anew when it is time and none is under way."""

    def __init__(self, work: Callable[[], Answer], every_s: float) -> None:
        self.work, self.every_s = work, every_s
        self.count = 0
        """Answers so far."""
        self._latest: Answer | None = None
        self._thread: threading.Thread | None = None
        self._asked = float("-inf")

    def poll(self) -> Answer | None:
        """The latest answer, without waiting; None before the first."""
        running = self._thread is not None and self._thread.is_alive()
        if not running and time.monotonic() - self._asked >= self.every_s:
            self._asked = time.monotonic()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self._latest

    def wait(self) -> Answer:
        """One answer more, to its end."""
        self.join()
        self._asked = time.monotonic()
        self._run()
        assert self._latest is not None, "work returns an answer"
        return self._latest

    def join(self) -> None:
        """Let a question under way end, but for one that is never answered."""
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        self._latest = self.work()
        self.count += 1
