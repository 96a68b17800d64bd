"""Every error a person can meet, each in four parts: what was wanted, what was got, where, and what to type next.

EyasError
|-- InputError            exit 2: wrong usage or bad input
|   |-- MissingDependency   the same, and the next step is an install line
|   `-- Unsupported         a kind that Eyas does not know
|-- CheckFailed           exit 1: a check or a comparison failed
|-- ServerDied            exit 3: a supervised process died or never became ready
`-- RankLost              exit 3: of several processes that train one draft, one ended or fell silent
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class EyasError(Exception):
    """An error for the person at the keyboard. `exit_code` is the process's exit status (docs/commands.md).

    `code` is the finding (docs/findings.md) that a check of the same input would report, where there is one.
    """

    exit_code = 2

    def __init__(self, *, wanted: str, got: str, where: str, next: str, code: str | None = None) -> None:
        self.wanted = wanted
        self.got = got if code is None else f"{got} ({code})"
        self.where = where
        self.next = next
        self.code = code
        super().__init__(f"wanted {wanted}; got {self.got}; at {where}; next: {next}")

    def as_dict(self) -> dict[str, str]:
        """The four parts, and the code where there is one."""
        code = {} if self.code is None else {"code": self.code}
        return {"wanted": self.wanted, "got": self.got, "where": self.where, "next": self.next, **code}

    @property
    def lines(self) -> str:
        """The parts below each other, as a terminal shows them."""
        return "\n".join(f"{part + ':':8}{text}" for part, text in self.as_dict().items())

    def as_json(self) -> dict[str, object]:
        """The body of `{"error": ...}` under --json: the parts, and what a kind of error adds."""
        return dict(self.as_dict())


class InputError(EyasError):
    """Wrong usage or bad input."""


class MissingDependency(InputError):
    """A package the command needs is not installed; `next` is the line to type."""


class Unsupported(InputError):
    """Nothing is wrong with what was given: Eyas does not know this kind."""


class CheckFailed(EyasError):
    """A check or a comparison failed; everything it wrote is kept."""

    exit_code = 1


class ServerDied(EyasError):
    """A supervised process died or never became ready. `facts` (state, cause, evidence, ...) join the JSON."""

    exit_code = 3

    def __init__(
        self, *, wanted: str, got: str, where: str, next: str, facts: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(wanted=wanted, got=got, where=where, next=next)
        self.facts = dict(facts or {})

    def as_json(self) -> dict[str, object]:
        return {**self.as_dict(), **self.facts}


class RankLost(EyasError):
    """One of the processes that train together ended, or fell silent, before the work was done."""

    exit_code = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the nearest known word, or an empty string."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f' (did you mean "{near[0]}"?)' if near else ""
