"""The lines that our own engine server writes while it starts: here for its writer and for the log's reader alike."""

import re

MARK = "[eyas] "
LINE = re.compile(
    r"\[eyas\] (?P<word>phase|ready|stopped|failed)(?:=(?P<value>[a-z_0-9]{1,40}))?"
    r"(?: progress=(?P<done>\d{1,6})/(?P<total>\d{1,6}))?"
)


def phase_line(phase: str, done: int | None = None, total: int | None = None) -> str:
    """`[eyas] phase=weights progress=3/64`: `phase` begins, or `done` of its `total` parts are done."""
    return f"{MARK}phase={phase}" + (f" progress={done}/{total}" if done is not None and total else "")


def ready_line(url: str) -> str:
    """The server answers requests at `url`: the warm-up is behind it."""
    return f"{MARK}ready url={url}"


def stopped_line(why: str) -> str:
    """The server ends because it was told to; `why` is what told it."""
    return f"{MARK}stopped why={why}"


def failed_line(cause: str, error: str) -> str:
    """The server ends with an error; `cause` is a code of launch/causes, or `unexplained`."""
    return f"{MARK}failed={cause} error={error}"
