"""Tracebacks in a log: raw or as records, of several processes at once, chained, answered or not."""

import re
from dataclasses import dataclass, field

from eyas.launch.lines import Line

OPENS = "Traceback (most recent call last):"
CHAINED = "During handling of the above exception"
CAUSED = "The above exception was the direct cause"
FRAME = re.compile(r' +File "(?P<file>[^"]{1,500})", line (?P<line>\d+)(?:, in (?P<name>.{1,80}))?')
EXCEPTION = re.compile(r"[A-Za-z_][\w.]{0,120}(?::(?: |$)|$)")
ANSWERED = {
    "": re.compile(r"Exception (?:in|ignored)|(?:Task|Future) exception was never retrieved|Error in "),
    "sglang": re.compile(r"rror|xception|[Ff]ail|[Ww]arn|Ignor|retry"),
    "uvicorn": re.compile(r"rror|xception|[Ff]ail|[Ww]arn"),
}
"""The line before a raw traceback that says: somebody caught it; by whose logger's record that line is. vLLM's logger
heads every line of a traceback, so a raw one after its record is nobody's."""
NOBODY = re.compile(r"(?!)")
MAX_FRAMES, MAX_DETAILS, MAX_SOURCES = 400, 8, 64


@dataclass
class Traceback:
    """One source's traceback, being read."""

    fatal: bool
    """It belongs to a record that says that the process ends, or nobody caught it."""
    caught: bool
    head: tuple[str, str]
    """`headed` and `at` of its lines: others of the same source interleave."""
    frame: str = ""
    """The innermost frame so far: `file:line name`."""
    frames: int = 0
    ended: bool = False
    """The exception's line was read; what follows may be more of its message."""
    details: int = 0
    chained: bool = False
    """It came up while another was handled: the first one is not what happened."""


@dataclass
class Tracebacks:
    """Which source is inside a traceback."""

    open: dict[str, Traceback] = field(default_factory=dict)
    before: dict[str, tuple[str, bool, str]] = field(default_factory=dict)
    """Of each source, and under "" of all: the last message, whether that said that the process ends, its logger."""

    def at(self, line: Line) -> Traceback | None:
        """The traceback that `line` goes on, if it does."""
        trace = self.open.get(_key(line))
        if trace is None:
            return None
        return trace if (line.headed, line.at) == trace.head else None

    def begin(self, line: Line, fatal: bool) -> Traceback:
        """`line` opens one. `fatal`: its own record says that the process ends."""
        key = _key(line)
        message, ending, logger = self.before.get(key, ("", False, ""))
        before = self.open.get(key)
        if before is not None and before.ended and message.startswith((CHAINED, CAUSED)):
            trace = Traceback(before.fatal, before.caught, before.head, chained=message.startswith(CHAINED))
        else:
            record = line.headed != "" or not line.message.startswith(OPENS)
            answered = ANSWERED.get(logger, NOBODY).search(message) is not None
            caught = not fatal and not ending and (record or answered)
            trace = Traceback(fatal or ending, caught, ("", "") if line.headed == "sglang" else (line.headed, line.at))
        self.open[key] = trace
        while len(self.open) > MAX_SOURCES:
            self.open.pop(next(iter(self.open)))
        return trace

    def went_by(self, line: Line, ending: bool) -> None:
        """Remember `line` as what stands before the next traceback of its source."""
        if len(self.before) > MAX_SOURCES:
            self.before.clear()
        self.before[_key(line)] = self.before[""] = (line.message, ending, line.headed)


def _key(line: Line) -> str:
    """Ranks of SGLang head only a traceback's first line; processes of vLLM head each."""
    return line.source if "pid=" in line.source else ""
