"""The thread that owns the engine: jobs and cancellations go in by a queue, what became of them comes out by a reader.

The event loop never computes and this thread never waits for a client. What readers have for the loop is handed over
once a turn, so that it is woken once for all texts. Whatever uses torch runs here, loading included: OpenMP keeps a
team of threads for every thread that computes, and with two teams on all cores its barriers go from spinning to
sleeping, which was seen to cost 30 % (docs/lab.md).
"""

import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from eyas.engine.batching import Job, Scheduler
from eyas.progress import say

Call = Callable[[], None]


@dataclass(frozen=True)
class Command:
    """`job` None: all of them; without `cancel`: stop."""

    job: Job | None
    cancel: bool = False


class Worker:
    """Runs a scheduler until it is stopped, or until it fails: then `failure` says why and everyone is told."""

    def __init__(
        self,
        scheduler: Scheduler,
        thread: Executor,
        on_failure: Callable[[str], None],
        hand_over: Callable[[list[Call]], None],
    ) -> None:
        """`thread` has one thread, in which the scheduler was made. `hand_over` is called there with what was left."""
        self.scheduler, self.thread, self.on_failure, self.hand_over = scheduler, thread, on_failure, hand_over
        self._left: list[Call] = []
        self.failure: str | None = None
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._running: Future[None] | None = None

    def start(self) -> None:
        self._running = self.thread.submit(self._run)

    @property
    def alive(self) -> bool:
        return self._running is not None and not self._running.done() and self.failure is None

    def submit(self, job: Job) -> None:
        self._commands.put(Command(job))

    def cancel(self, job: Job) -> None:
        self._commands.put(Command(job, cancel=True))

    def cancel_all(self) -> None:
        self._commands.put(Command(None, cancel=True))

    def stop(self) -> None:
        """Cancel what is left; returns when the thread is free."""
        self._commands.put(Command(None))
        if self._running is not None:
            self._running.result()

    def leave(self, call: Call) -> None:
        """For the event loop, in the engine's thread."""
        self._left.append(call)

    def _clear(self) -> None:
        if self._left:
            left, self._left = self._left, []
            self.hand_over(left)

    def _run(self) -> None:
        try:
            while self._take():
                self.scheduler.step()
        except Exception as error:  # noqa: BLE001 - whatever it is, every client must hear of it and the process must end
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            say(traceback.format_exc())
            self.scheduler.fail(self.failure)
            self._clear()
            self.on_failure(self.failure)

    def _take(self) -> bool:
        """Do what is asked, waiting only where there is nothing to compute. False: stop."""
        while True:
            self._clear()
            try:
                command = self._commands.get(block=self.scheduler.idle)
            except Empty:
                return True
            if command.cancel:
                for job in self.scheduler.jobs if command.job is None else [command.job]:
                    self.scheduler.cancel(job)
            elif command.job is not None:
                self.scheduler.submit(command.job)
            else:
                self.scheduler.fail("the server is stopping")
                self._clear()
                return False
