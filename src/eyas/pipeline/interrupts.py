"""Signals that end a command which stays with a server: interrupts all, and none while a server is half started."""

import signal
from collections.abc import Generator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signalled(KeyboardInterrupt):
    """SIGTERM or SIGHUP came, which end a command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """What became of the signals: held until `release`, raised from then on."""

    def __init__(self) -> None:
        self.held = True
        self.came: int | None = None

    def handle(self, number: int, frame: object) -> None:
        self.came = number
        if not self.held:
            self.release()

    def release(self) -> None:
        """Raise what came so far, and from now on at once. Raises KeyboardInterrupt, Signalled."""
        self.held = False
        if self.came is not None:
            raise KeyboardInterrupt if self.came == signal.SIGINT else Signalled(self.came)


@contextmanager
def interrupts() -> Generator[Interrupts]:
    """Take the ending signals over. One that was ignored when the command began stays ignored, as shells and nohup mean
    it: SIGINT of a background job, SIGHUP; SIGTERM always ends."""
    came = Interrupts()
    taken = [number for number in ENDING if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, came.handle) for number in taken}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def by_keyboard() -> bool:
    """Whether Ctrl-C is heeded here."""
    return signal.getsignal(signal.SIGINT) != signal.SIG_IGN
