"""One answer on its way from the engine's thread to the event loop: text, tokens, and how it ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eyas.engine.batching import End, Outcome
from eyas.engine.logprobs import TokenLogprob
from eyas.engine.server.detokenise import Decode, Detokeniser, StopWatch
from eyas.engine.verify import Verdict


@dataclass(frozen=True)
class Piece:
    """What a round brought. `texts` has an entry a token, empty where its text is not certain yet; `accepted` says
    which tokens were drafted."""

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    accepted: tuple[bool, ...] = ()
    notes: tuple[TokenLogprob, ...] = ()
    rest: str = ""
    """Text of earlier tokens that became certain with the end."""
    end: "Ending | None" = None

    @property
    def text(self) -> str:
        return "".join(self.texts) + self.rest


@dataclass(frozen=True)
class Ending:
    """How an answer ended: `finish` is stop or length; else `end` says what went wrong and `error` why."""

    end: End
    finish: str | None
    stop: str | int | None
    """The stop string or token that ended it."""
    tokens: int
    """Emitted, up to the one that completed a stop string; the stop token included."""
    outcome: Outcome | None
    error: str | None


@dataclass
class AnswerReader:
    """Turns an engine's tokens into pieces, in the engine's thread, and hands them on."""

    decode: Decode
    stops: Sequence[str]
    stop_ids: frozenset[int]
    send: Callable[[Piece], None]
    """Called in the engine's thread."""
    count: int = 0
    last: int | None = None

    def __post_init__(self) -> None:
        self.detokeniser, self.watch = Detokeniser(self.decode), StopWatch(self.stops)

    def tokens(self, verdict: Verdict, notes: Sequence[TokenLogprob]) -> bool:
        texts = list[str]()
        ends = verdict.finish == "stop"
        for index, token in enumerate(verdict.tokens):
            self.last = token
            last = index + 1 == len(verdict.tokens)
            texts.append("" if ends and last else self.watch.add(self.detokeniser.add(token)))
            if self.watch.found is not None:
                break
        count = len(texts)
        self.count += count
        accepted = tuple(index < verdict.kept for index in range(count))
        self.send(Piece(verdict.tokens[:count], tuple(texts), accepted, tuple(notes[:count])))
        return self.watch.found is not None

    def ended(self, end: End, outcome: Outcome | None, error: str | None) -> None:
        rest, finish, stop = "", None, None
        if end == "done" and outcome is not None and self.watch.found is None:
            rest = self.watch.add(self.detokeniser.end()) + self.watch.end()
            finish = "stop" if outcome.finish == "stop" else "length"
            stop = self.last if finish == "stop" and self.last not in self.stop_ids else None
        if self.watch.found is not None:
            finish, stop = "stop", self.watch.found
        self.send(Piece(rest=rest, end=Ending(end, finish, stop, self.count, outcome, error)))
