"""Which of a failing server's lines explains: the first root, not the last line."""

from collections import deque
from dataclasses import dataclass, field, replace

from eyas.launch.causes import TABLE, UNEXPLAINED, UNEXPLAINED_ADVICE, Cause
from eyas.launch.lines import shown

NEAR_LINES = 500
"""An error that was caught this long before the end did not bring it about."""
MAX_LOOSE = 64
DETAIL_CHARACTERS = 300
RANKS = {"root": 0, "symptom": 1, "end": 3}


@dataclass
class Clue:
    """A line that may explain. `tight`: of a traceback that ended a process, or fatal itself."""

    order: int
    code: str
    advice: str
    kind: str
    tight: bool
    evidence: str
    frame: str = ""
    state: str = "crashed"
    """What the line says the server is."""

    @property
    def rank(self) -> tuple[int, bool, int]:
        return RANKS[self.kind], not self.tight, self.order

    def line(self) -> str:
        """The evidence as shown: of an exception that no row fits also its innermost frame."""
        return f"{shown(self.evidence)} [{self.frame}]" if self.frame else shown(self.evidence)


def clue(order: int, row: Cause, advice: str, tight: bool, evidence: str) -> Clue:
    """A line that a row of the table fits."""
    return Clue(order, row.code, advice, row.kind, tight, evidence, state=row.state)


def exception_clue(order: int, tight: bool, evidence: str, frame: str) -> Clue:
    """An exception that no row fits: as telling as a symptom, for what brought a process down is named in neither."""
    return Clue(order, UNEXPLAINED, UNEXPLAINED_ADVICE, "symptom", tight, evidence, frame)


def own_clue(order: int, code: str, evidence: str) -> Clue:
    """The line with which our own server ends: it names the code itself, and where it can what to type."""
    _, told, said = evidence.rpartition("; next: ")
    if code in ("", UNEXPLAINED):
        found = exception_clue(order, True, evidence, "")
        return replace(found, advice=said) if told else found
    known = (row.advice for row in TABLE if row.code == code and "{" not in row.advice)
    advice = said if told else next(known, UNEXPLAINED_ADVICE)
    return Clue(order, code, advice, "root", True, evidence)


@dataclass
class Clues:
    """The clues of one start, in bounded memory: the first of each rank that is tight, the loose ones that are near."""

    tight: dict[str, Clue] = field(default_factory=dict)
    loose: deque[Clue] = field(default_factory=lambda: deque(maxlen=MAX_LOOSE))
    ended_at: int | None = None

    def add(self, new: Clue) -> None:
        if new.tight:
            self.tight.setdefault(f"{new.kind} {new.state}", new)
            return
        if self.ended_at is not None and len(self.loose) == MAX_LOOSE:
            return
        if not any(old.code == new.code != UNEXPLAINED and new.order - old.order < NEAR_LINES for old in self.loose):
            self.loose.append(new)

    def replace(self, old: Clue, new: Clue) -> None:
        """`new` came up while `old` was handled: it is what happened."""
        self.tight = {kind: clue for kind, clue in self.tight.items() if clue is not old}
        self.loose = deque((clue for clue in self.loose if clue is not old), maxlen=MAX_LOOSE)
        self.add(new)

    def forgive(self) -> None:
        """The server went on: what looked like its end was none."""
        for old in self.tight.values():
            old.tight = False
            self.loose.append(old)
        self.tight, self.ended_at = {}, None

    def best(self, state: str) -> Clue | None:
        """What explains that the server is crashed or stopped; None where nothing does."""
        since = (self.ended_at or 0) - NEAR_LINES
        near = [*self.tight.values(), *(clue for clue in self.loose if clue.order >= since)]
        return min((clue for clue in near if clue.state == state), key=lambda clue: clue.rank, default=None)
