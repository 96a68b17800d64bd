"""Reading other people's prompt files: JSON lines in the shapes people have.

A line is an object with `messages` or `conversations` (turns of role/content, or ShareGPT's from/value) or with
`prompt` (a string, or turns). `text` holds an already rendered conversation; it is accepted only when the caller asks
for preformatted text, because nothing in it says which tokens are the answer.

What is decided here: whether a line can be read, whether it asks anything (a user turn), whether its answers hold any
text at all. What is decided later, by the captures stage, because it needs the tokenizer: the loss mask of a kept or
preformatted answer (an empty mask is an error there, never a silent zero) and answers cut away by `max_length`
(counted there as "assistant truncated"). Whether a template takes two user turns in a row is the respond stage's.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from eyas.errors import InputError

Message = dict[str, str]
OnError = Literal["skip", "stop"]

TURN_KEYS = ("messages", "conversations", "prompt")
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
TOOL_ROLES = {"tool", "function", "observation", "ipython"}
PROBLEMS_KEPT = 20


@dataclass(frozen=True)
class Record:
    """One conversation as read, its leading assistant turns dropped. `text` is set for preformatted lines only."""

    id: str
    messages: tuple[Message, ...]
    line: int
    text: str | None = None

    @property
    def prompt(self) -> list[Message]:
        """System and user turns: what is asked. The target answers each user turn itself."""
        return [message for message in self.messages if message["role"] != "assistant"]

    @property
    def fingerprint(self) -> bytes:
        """16 bytes of the sha256 of what is asked; records that ask the same are duplicates, whatever the answers."""
        asked = self.text if self.text is not None else [[turn["role"], turn["content"]] for turn in self.prompt]
        return hashlib.sha256(json.dumps(asked).encode()).digest()[:16]


@dataclass(frozen=True)
class Problem:
    """A line that was not used."""

    line: int
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}{': ' + self.detail if self.detail else ''}"


@dataclass
class Tally:
    """What happened to the lines of a file. Every line that is not blank is in `kept` or in `skipped`, once."""

    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason to count; duplicates are in here."""
    repaired: Counter[str] = field(default_factory=Counter)
    """Repair to the count of kept lines (or turns, for roles) it was done to."""
    unknown_roles: Counter[str] = field(default_factory=Counter)
    """Role name to the count of turns read as assistant turns."""
    problems: list[Problem] = field(default_factory=list)
    """The first few unusable lines, with their numbers."""

    @property
    def warnings(self) -> list[str]:
        """One warning for each unknown role, naming it."""
        return [
            f"unknown role {role!r} ({count} turn{'s' if count > 1 else ''}) was read as assistant"
            for role, count in sorted(self.unknown_roles.items())
        ]


class _Skip(Exception):
    """This line cannot be used."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def read_records(path: Path, *, on_error: OnError = "skip", preformatted: bool = False) -> tuple[list[Record], Tally]:
    """All usable records of a file, and what was skipped or repaired; see `iter_records`."""
    tally = Tally()
    return list(iter_records(path, tally, on_error=on_error, preformatted=preformatted)), tally


def iter_records(
    path: Path, tally: Tally, *, on_error: OnError = "skip", preformatted: bool = False
) -> Iterator[Record]:
    """Usable, distinct records of a JSONL file in file order, `tally` counting the rest. Memory: 16 bytes a record.

    Raises InputError for a file that is missing, a folder, unreadable, a JSON array or not UTF-8; and, with
    `on_error="stop"`, at the first unusable line, naming file, line and reason. Duplicates never stop.
    """
    seen: set[bytes] = set()
    ids: dict[str, int] = {}
    for number, line in _lines(path):
        repairs: Counter[str] = Counter()
        try:
            record = _parse(number, line, preformatted, repairs, tally.unknown_roles)
        except _Skip as skip:
            problem = Problem(number, skip.reason, skip.detail)
            if on_error == "stop":
                raise InputError(
                    wanted="a usable record on every line (on_error is stop)",
                    got=f"{problem.reason}{': ' + problem.detail if problem.detail else ''}",
                    where=f"{path}, line {number}",
                    next="mend or remove that line, or set prompts.on_error=skip",
                ) from skip
            tally.skipped[skip.reason] += 1
            if len(tally.problems) < PROBLEMS_KEPT:
                tally.problems.append(problem)
            continue
        if record.fingerprint in seen:
            tally.skipped["duplicate"] += 1
            continue
        seen.add(record.fingerprint)
        tally.kept += 1
        tally.repaired.update(repairs)
        yield _with_free_id(record, ids, tally)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank. Split at newlines only: JSON strings may hold U+2028 and the like."""
    if not path.exists():
        raise InputError(wanted="a JSONL file of prompts", got="no such file", where=str(path), next="check the path")
    if path.is_dir():
        raise InputError(
            wanted="a JSONL file of prompts",
            got="a folder",
            where=str(path),
            next=f"name a file in it: {path}/FILE.jsonl",
        )
    first = True
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = _decode(path, number, raw).strip()
                if not line:
                    continue
                if first and line.startswith("["):
                    raise InputError(
                        wanted="JSON lines: one object on each line",
                        got="a JSON array",
                        where=f"{path}, line {number}",
                        next=f"jq -c '.[]' {path.name} > {path.stem}.jsonl",
                    )
                first = False
                yield number, line
    except OSError as error:
        raise InputError(
            wanted="to read a JSONL file",
            got=error.strerror or str(error),
            where=str(path),
            next="check its permissions",
        ) from error


def _decode(path: Path, number: int, raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            wanted="a UTF-8 text file",
            got=f"byte 0x{raw[error.start]:02x} ({error.reason})",
            where=f"{path}, line {number}, byte {error.start + 1}",
            next=f"iconv -f ENCODING -t utf-8 {path.name} > {path.stem}.utf8.jsonl",
        ) from error
    return text.removeprefix("\ufeff") if number == 1 else text


def _parse(number: int, line: str, preformatted: bool, repairs: Counter[str], unknown: Counter[str]) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Skip("bad JSON", str(error)) from error
    if not isinstance(value, dict):
        raise _Skip("not an object", f"a JSON {type(value).__name__}")
    name = value.get("id")
    name = str(name) if isinstance(name, str | int) and name != "" else f"line-{number}"
    _check_unicode(name)
    turns = next((value[key] for key in TURN_KEYS if value.get(key) is not None), None)
    if turns is None:
        return _parse_text(name, number, value, preformatted)
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list):
        raise _Skip("turns are not a list", f"a JSON {type(turns).__name__}")
    if not turns:
        raise _Skip("empty conversation")
    roles: Counter[str] = Counter()
    messages = [_message(turn, repairs, roles) for turn in turns]
    record = Record(name, tuple(_asking(messages, repairs)), number)
    unknown.update(roles)
    return record


def _check_unicode(text: str) -> str:
    r"""`text` if it can be written as UTF-8: JSON can escape half a surrogate pair (`"\ud800"`)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Skip("broken Unicode", "a lone surrogate escape") from error
    return text


def _parse_text(name: str, number: int, value: dict[str, Any], preformatted: bool) -> Record:
    text = value.get("text")
    if not isinstance(text, str):
        raise _Skip(
            "no known key", f"has {', '.join(map(repr, value)) or 'no keys'}; wanted one of {', '.join(TURN_KEYS)}"
        )
    if not preformatted:
        raise _Skip("preformatted text", "`text` is read only where preformatted text is asked for")
    if not text.strip():
        raise _Skip("empty conversation")
    return Record(name, (), number, _check_unicode(text))


def _message(turn: Any, repairs: Counter[str], unknown: Counter[str]) -> Message:
    if not isinstance(turn, dict):
        raise _Skip("turn is not an object", f"a JSON {type(turn).__name__}")
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str) or not name.strip():
        raise _Skip("turn without a role", f"has {', '.join(map(repr, turn)) or 'no keys'}")
    key = name.strip().lower()
    if key in TOOL_ROLES:
        raise _Skip("tool turn", f"role {name!r}: tool use cannot be asked again")
    role = ROLES.get(key)
    if role is None:
        role = "assistant"
        repairs["unknown role read as assistant"] += 1
        unknown[name] += 1
    content = _content(turn.get("content", turn.get("value")), role, repairs)
    return {"role": role, "content": content}


def _content(value: Any, role: str, repairs: Counter[str]) -> str:
    """Text as it is, a number as its digits, OpenAI text parts joined; an assistant turn may have none."""
    if isinstance(value, str):
        return _check_unicode(value)
    if isinstance(value, int | float):
        repairs["number made text"] += 1
        return str(value)
    if value is None and role == "assistant":
        return ""
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        return _check_unicode("".join(part["text"] for part in value))
    kind = "null" if value is None else f"a JSON {type(value).__name__}"
    raise _Skip("content is not text", f"the content of a {role} turn is {kind}")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _asking(messages: list[Message], repairs: Counter[str]) -> list[Message]:
    """The conversation from its first user turn on, system turns before it kept."""
    asks = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not asks:
        raise _Skip("no user turn")
    if any(not messages[index]["content"].strip() for index in asks):
        raise _Skip("empty user turn")
    lead = [message for message in messages[: asks[0]] if message["role"] == "system"]
    if len(lead) < asks[0]:
        repairs["leading assistant turn dropped"] += 1
    rest = messages[asks[0] :]
    answers = [message["content"] for message in rest if message["role"] == "assistant"]
    if answers and not any(answer.strip() for answer in answers):
        # Nothing to supervise, and as a rule the trace of a generation that failed: not worth asking again.
        raise _Skip("empty assistant answer")
    return lead + rest


def _with_free_id(record: Record, ids: dict[str, int], tally: Tally) -> Record:
    """`record` under an id that no earlier record has (responses are keyed by it); `ids` maps id to times met."""
    name = record.id
    while name in ids:
        ids[record.id] += 1
        name = f"{record.id}-{ids[record.id]}"
    ids[name] = 1
    if name == record.id:
        return record
    tally.repaired["repeated id renamed"] += 1
    return replace(record, id=name)
