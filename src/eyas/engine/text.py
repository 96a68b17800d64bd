"""A text in the making, and a finished one: all that rounds read and change, apart from the rows of the caches."""

from dataclasses import dataclass, field

from eyas.engine.propose import Proposer
from eyas.engine.verify import Finish, Judge, Verdict


@dataclass(frozen=True)
class Generation:
    """A finished text. The first of `ids` is the prefill's own token; it belongs to no round."""

    ids: tuple[int, ...]
    finish: Finish
    """`stop`: a stop token, which is the last of `ids`; `length`: the limit asked for; `context`: the target's own."""
    rounds: tuple[int, ...]
    """Drafted tokens accepted in each round, before a stop token or length limit cut it."""
    rounds_kept: tuple[int, ...]
    """The same after the cut: accepted drafted tokens that were emitted."""
    depths: tuple[int, ...]
    """Levels drafted in each round; 0 is a plain step."""
    valid: bool
    """False where acceptance was simulated: the text is not the target's."""
    seconds_prefill: float
    """Until the first token is known."""
    seconds_decode: float
    """All the rest, the draft's own prefill included."""

    @property
    def accept_length(self) -> float | None:
        """Tokens gained a round, bonus included; None where the prefill's token ended the text."""
        return 1 + sum(self.rounds) / len(self.rounds) if self.rounds else None

    @property
    def survival(self) -> list[float]:
        """Share of all rounds whose first 1, 2, ... drafted tokens were accepted, as deep as any drafted."""
        deepest = max(self.depths, default=0)
        return [sum(n >= level for n in self.rounds) / len(self.rounds) for level in range(1, deepest + 1)]


@dataclass
class Text:
    """A text in the making: all that its rounds read and change, but for the caches' rows."""

    prompt: tuple[int, ...]
    limit: int
    """Tokens it may have; `end` says what that limit is."""
    end: Finish
    stop_ids: frozenset[int]
    judge: Judge
    proposer: Proposer | None
    """Who drafts for it; None decodes plainly."""
    num_steps: int
    """Levels drafted a round at most."""
    ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    rounds: list[Verdict] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    """When it was begun, when its first token was known, when its latest round ended."""

    @property
    def last(self) -> int:
        return self.ids[-1]

    @property
    def position(self) -> int:
        """Of the last token, whose row is not in the cache yet."""
        return len(self.prompt) + len(self.ids) - 1

    def take(self, verdict: Verdict) -> None:
        self.ids.extend(verdict.tokens)
        self.judge.tell(verdict.tokens)
        self.finish = self.end if verdict.finish == "length" else verdict.finish

    def generation(self) -> Generation:
        assert self.finish is not None, "a text that goes on is no generation"
        rounds = tuple(verdict.accepted for verdict in self.rounds)
        kept = tuple(verdict.kept for verdict in self.rounds)
        begun, first, ended = self.clock
        seconds = (first - begun, ended - first)
        return Generation(tuple(self.ids), self.finish, rounds, kept, tuple(self.depths), self.judge.valid, *seconds)
