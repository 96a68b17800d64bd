"""Why servers die: the table (causes.toml), and what a line of a log means by it.

Opposite advices that look alike are rows of their own: "Not enough memory" asks for a larger --mem-fraction-static, a
CUDA out of memory for a smaller one.
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from eyas.launch.known_flags import nearest_flag
from eyas.launch.phases import Engine


@dataclass(frozen=True)
class Cause:
    """A row: what a line of a failing server means, and what to change.

    `kind` decides between rows that fit different lines of one failure: a root explains; a symptom is what a root does
    to others (a compiler that failed, a peer that left); an end only says that the server is gone.
    """

    code: str
    words: tuple[str, ...]
    """The message holds one of these: asked before the pattern, which costs more."""
    pattern: str
    """Searched for in the message; its named groups may stand in `advice`."""
    advice: str
    """A line to change or to type. {named} groups of the pattern are filled in."""
    seen: str
    """Where the words come from: an engine's file and version, or a case."""
    engines: tuple[Engine, ...] = ()
    """Whose lines these are; empty: anybody's."""
    kind: Literal["root", "symptom", "end"] = "root"
    fatal: bool = False
    """The line alone means that the server is gone (`state`), whatever follows."""
    raw: bool = False
    """Also outside tracebacks and error records: in what a compiler, a shell or C++ prints."""
    phases: tuple[str, ...] = ()
    """Only while the server is in one of these phases; empty: in any."""
    state: Literal["crashed", "stopped"] = "crashed"

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def advise(self, match: re.Match[str]) -> str:
        """The advice with what the line says filled in."""
        said = {name: value or "?" for name, value in match.groupdict().items()}
        if "{near}" in self.advice:
            said["near"] = nearest_flag(program(said.get("prog", "")) or "", said["flag"])
        return self.advice.format(**said) if "{" in self.advice else self.advice


def _table() -> tuple[Cause, ...]:
    rows = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))["cause"]
    return tuple(Cause(**_row(row)) for row in rows)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


TABLE = _table()
UNEXPLAINED = "unexplained"
"""The code of a failure that no row fits: its evidence is an exception with its innermost frame."""
UNEXPLAINED_ADVICE = "no row of docs/causes.md fits: read the log from the evidence line on"
WORDS = tuple((word, row) for row in TABLE for word in row.words)
RAW_WORDS = tuple((word, row) for word, row in WORDS if row.raw)
NO_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
LETTERS = bytes(byte if chr(byte).isalpha() and byte < 128 else 32 for byte in range(256))
"""Both as tables of bytes, which cost a tenth of a string's."""
SHAPES = tuple({word.encode().translate(NO_DIGITS) for word, _ in WORDS})
SHORT = 300
REQUESTS = ("Receive: ", "Receive OpenAI: ", "Finish: ", "Received request ", "Generated response ")
"""What both engines print of requests: the words are a user's."""


def _key(word: bytes) -> bytes:
    """How one of `word`'s own words begins: a long one, for a message may go on with it; not the first, if possible."""
    whole = list(re.finditer(rb"(?<![A-Za-z])[A-Za-z]{3,}", word))
    return max(whole, key=lambda token: (len(token.group()) >= 5, token.start() > 0, len(token.group()))).group()[:5]


KEYS = frozenset(_key(word) for word in SHAPES)


@lru_cache(maxsize=4096)
def _silent(shape: bytes) -> bool:
    """No row fits a message of this shape (its digits are all 0): floods repeat their shape, and are asked once."""
    if KEYS.isdisjoint([word[:5] for word in shape.translate(LETTERS).split()]):
        return True
    for word in SHAPES:  # noqa: SIM110  a generator takes twice as long
        if word in shape:
            return False
    return True


def find(message: str, engine: str | None, phase: str | None, raw: bool) -> tuple[Cause, re.Match[str]] | None:
    """The first row that fits, or None. `raw`: only rows that also count outside tracebacks and error records."""
    if message.startswith(REQUESTS) or (len(message) < SHORT and _silent(message.encode().translate(NO_DIGITS))):
        return None
    for word, row in RAW_WORDS if raw else WORDS:
        if word not in message:
            continue
        if (engine and row.engines and engine not in row.engines) or (row.phases and phase not in row.phases):
            continue
        if match := row.regex.search(message):
            return row, match
    return None


def engine_named(row: Cause, match: re.Match[str]) -> Engine | None:
    """The engine that the row or the line itself names: a program in a usage error, a module that is missing."""
    said = match.groupdict()
    named = program(said.get("prog") or said.get("engine") or "")
    return named or (row.engines[0] if len(row.engines) == 1 else None)


PROGRAMS: dict[Engine, tuple[str, ...]] = {
    "sglang": ("sglang", "launch_server"),
    "vllm": ("vllm", "api_server"),
    "embedded": ("eyas",),
}


def program(name: str) -> Engine | None:
    """The engine whose server a program of this name starts."""
    return next((engine for engine, marks in PROGRAMS.items() if any(mark in name for mark in marks)), None)
