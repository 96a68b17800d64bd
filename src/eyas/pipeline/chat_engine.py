"""An engine in this process that answers conversations, earlier turns' rows kept from one answer to the next."""

import time
from collections.abc import Iterator
from pathlib import Path

from eyas.clients.chat import Part, Stats
from eyas.data.samples import render
from eyas.engine.batching import Job, Outcome, Scheduler
from eyas.engine.generate import Engine
from eyas.engine.precision import load_to_decode
from eyas.engine.server.stream import AnswerReader, Piece
from eyas.errors import InputError
from eyas.models.checkpoint import look_at
from eyas.models.fitting import load_fitting
from eyas.recipe import ChatSettings, TargetSettings
from eyas.settings import DraftingSettings

Message = dict[str, str]


class EngineChat:
    """Loads the target, and the draft in `folder` (None: no draft). Raises InputError for what does not load or fit."""

    def __init__(self, target: TargetSettings, settings: ChatSettings, folder: Path | None = None) -> None:
        if folder is not None:
            look_at(folder, settings.num_steps)
        int8 = settings.precision == "int8"
        loaded = load_to_decode(target.name, settings.precision, trust_remote_code=target.trust_remote_code)
        draft = None
        if folder is not None:
            draft, _ = load_fitting(folder, loaded)
        drafts = settings.num_steps > 0 and (draft is not None or settings.ngrams > 0)
        drafting = DraftingSettings(
            num_steps=settings.num_steps if drafts else 1, ngram=settings.ngrams if drafts else 0, adaptive=drafts
        )
        self.engine = Engine(loaded, draft, drafting=drafting, int8=int8, draft_int8=int8)
        self.num_steps = self.engine.num_steps if drafts else 0
        self.scheduler = Scheduler(self.engine, cache_rows=2 * loaded.context_length, most=1)
        self.target, self.settings, self.name = loaded, settings, loaded.identity.name
        self.no_marks = None if drafts else "nothing is drafted"

    def close(self) -> None:
        self.engine.close()

    def answer(self, messages: list[Message]) -> Iterator[Part | Stats]:
        """Parts as the rounds bring them; a caller that stops asking ends the text.

        Raises InputError for a conversation that the target's context does not hold, and for what else the engine
        refuses.
        """
        ids = tuple(render(self.target.tokenizer, messages).ids)
        require_room(len(ids), self.target.context_length, messages)
        settings = self.settings
        self.engine.prepare(ids, settings.max_new_tokens, self.num_steps, sampling=settings.sampling)
        pieces = list[Piece]()
        reader = AnswerReader(self.target.text, (), frozenset(self.target.stop_ids), pieces.append)
        job = Job(ids, settings.max_new_tokens, reader, self.num_steps, sampling=settings.sampling)
        started, first = time.monotonic(), None
        self.scheduler.submit(job)
        try:
            while not self.scheduler.idle:
                self.scheduler.step()
                for piece in pieces:
                    if piece.ids and first is None:
                        first = time.monotonic() - started
                    yield from parts(piece)
                    if piece.end is not None:
                        yield stats(piece, first, time.monotonic() - started)
                pieces.clear()
        finally:
            self.scheduler.cancel(job)


def parts(piece: Piece) -> list[Part]:
    marked = [Part(text, accepted) for text, accepted in zip(piece.texts, piece.accepted, strict=True) if text]
    return [*marked, Part(piece.rest)] if piece.rest else marked


def require_room(tokens: int, context: int, messages: list[Message]) -> None:
    if tokens >= context:
        begun = any(message["role"] == "assistant" for message in messages)
        raise InputError(
            wanted=f"a conversation of at most {context - 1} tokens (the target's context is {context})",
            got=f"{tokens} tokens with this line",
            where=f"the line that begins {messages[-1]['content'][:40]!r}",
            next="a shorter line" + (", or /new, which forgets what was said" if begun else ""),
        )


def stats(piece: Piece, first: float | None, seconds: float) -> Stats:
    """Raises InputError for a text that the engine refused, or failed at."""
    assert piece.end is not None, "an answer has ended"
    if piece.end.error is not None:
        raise InputError(
            wanted="an answer to its end", got=piece.end.error, where="the engine", next="another line, or /new"
        )
    outcome: Outcome | None = piece.end.outcome
    assert outcome is not None, "a text that had a seat has an outcome"
    rounds = outcome.rounds
    length = 1 + sum(rounds) / len(rounds) if rounds else None
    counts = (len(rounds) or None, outcome.cached_tokens, piece.end.finish)
    return Stats(piece.end.tokens, first, seconds, length, *counts)
