"""From bytes in any chunking to lines in bounded memory, and from a line to who said it, when and how loudly.

Heads (what stands before the message), any of them after another:
- ours, docker's and kubectl's time stamp (`2026-11-29T18:20:01.250 `), docker compose's name, journald's head;
- SGLang `[2026-05-19 00:09:18 TP5 EP5] ` (scheduler.py, utils/common.py 0.5.23: no level word);
- vLLM `(EngineCore pid=9) INFO 06-27 16:56:44 [core.py:109] ` (logger.py 0.33; the process part is older than that
  and absent in single-process logs);
- uvicorn `INFO:     `; llama.cpp `0.00.198.766 I `.
"""

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

MAX_LINE_BYTES = 8192
"""A line is cut here: no line that explains a failure was seen to say so later."""
SHOWN_CHARACTERS = 400

ENDS = re.compile(rb"[\r\n]+")
ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)|[ -/]*[0-~]?)|\x9b[0-?]*[ -/]*[@-~]"
)
HEAD = re.compile(
    r"(?:(?P<stamp>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?:Z|[+-]\d\d:?\d\d)? )?"
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w@.-]+\[\d+\]: )?"
    r"(?:[a-z][\w.]*-\d+ +\| )?"
    r"(?:\((?P<process>\w[\w .-]{0,40}? pid=\d+)(?:, ip=[\d.]+)?\) ?)?"
    r"(?:\[(?P<sglang>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{3})?)(?P<ranks>(?: [A-Z_]{2,7}\d{1,4})*)\] "
    r"|(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<vllm>\d\d-\d\d \d\d:\d\d:\d\d) \[?(?P<at>[\w./-]+:\d+)\] ?"
    r"|\d{1,4}\.\d\d\.\d{3}\.\d{3} (?P<letter>[DIWE]) )?"
    r"(?:srv +)?(?:(?P<uvicorn>DEBUG|INFO|WARNING|ERROR|CRITICAL): +)?"
)
LETTERS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR"}
BAR = re.compile(
    r"(?P<what>[^|%]{0,90}?):? *\d{1,3}%(?: Completed)? ?\|(?:[^|]{0,200}\|)? ?(?P<done>\d{1,6})/(?P<total>\d{1,6}) \["
)


class Line(NamedTuple):
    """One line of a log, its head taken off."""

    text: str
    """The whole line, printable apart from its length."""
    message: str
    source: str
    """Which process or rank said it; empty where the head does not say."""
    level: str
    """DEBUG INFO WARNING ERROR CRITICAL, or empty: SGLang and raw stderr have none."""
    headed: str
    """The head that marks a record of a logger: sglang, vllm, uvicorn, llamacpp; empty: raw output."""
    time: str
    at: str
    """vLLM's `file.py:line` of the record."""


class LineSplitter:
    """Lines end at \\n, \\r or both; empty lines and NUL bytes (UTF-16, holes of a truncated file) are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, block: bytes) -> Iterator[str]:
        """The lines that `block` completes."""
        *whole, rest = ENDS.split(self._rest + block.translate(None, b"\0"))
        self._rest = rest[:MAX_LINE_BYTES]
        for line in whole:
            if line:
                yield line[:MAX_LINE_BYTES].decode("utf-8", errors="replace")

    def rest(self) -> str:
        """What follows the last line end: a line still being written."""
        return self._rest.decode("utf-8", errors="replace")

    def cut(self) -> str:
        """`rest`, and forget it: what comes next is another file's."""
        rest = self.rest()
        self._rest = b""
        return rest


def parse(text: str) -> Line:
    """Take the head off one line."""
    if not text.isprintable():
        text = clean(text)
    if text[:1].isspace():
        return Line(text, text, "", "", "", "", "")
    match = HEAD.match(text)
    assert match is not None, "every part of HEAD is optional"
    stamp, process, sglang, ranks, level, vllm, at, letter, uvicorn = match.groups()
    headed = "uvicorn" if uvicorn else "sglang" if sglang else "vllm" if vllm else "llamacpp" if letter else ""
    return Line(
        text,
        text[match.end() :],
        process or (ranks or "").strip(),
        level or uvicorn or LETTERS.get(letter or "", ""),
        headed,
        sglang or vllm or stamp or "",
        at or "",
    )


def clean(text: str) -> str:
    """`text` without terminal escapes and control characters."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "" for c in ESCAPES.sub("", text))


def shown(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """`text` as it may be put on a terminal: clean and clipped."""
    text = text if text.isprintable() else clean(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def when(time: str, after: datetime | None, today: datetime) -> datetime | None:
    """A line's time, as the machine that wrote it wrote it: no zone is known.

    vLLM's stamps have no year: the last one that is not in the future, or the next after a line of December.
    None: no time, or no date of any calendar.
    """
    try:
        if len(time) >= 19:
            return datetime.strptime(time[:19].replace("T", " "), "%Y-%m-%d %H:%M:%S")
        if not time:
            return None
        year = after.year if after else today.year
        moment = datetime.strptime(f"{year}-{time}", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    if after and after.month == 12 and moment.month == 1:
        return moment.replace(year=year + 1)
    if not after and moment > today + timedelta(days=1) and not (moment.month == 2 and moment.day == 29):
        return moment.replace(year=year - 1)
    return moment
