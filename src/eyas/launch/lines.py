"""From bytes in any chunking to lines in bounded memory; what a terminal must not be shown is removed."""

import re
from collections.abc import Iterator

MAX_LINE_BYTES = 8192
"""A line is cut here: no line that explains a failure was seen to say so later."""
SHOWN_CHARACTERS = 400

ENDS = re.compile(rb"[\r\n]+")
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~]?)|\x9b[0-?]*[ -/]*[@-~]")


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


def printable(line: str) -> str:
    """`line` without terminal escapes and control characters, clipped."""
    if not line.isprintable():
        line = "".join(c if c.isprintable() else " " for c in ESCAPES.sub("", line))
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"
