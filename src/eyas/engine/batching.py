"""Several texts at once on one engine: who is admitted, whose prompt goes on, whose round is next.

Every turn: requests are admitted in order while cache rows last; one prompt goes on by one chunk, so that a long one
stalls nobody for longer; every text whose prompt is done goes on by a round. What a request gets depends on nothing but
itself: its rows, its drafted tokens' fate and its draws are those of a lone run (docs/server.md).

One thread owns a Scheduler. Only `submit` and `cancel` may be called from others, and only through that thread's queue.
"""

import time
import traceback
from collections import deque
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.batch_costs import batch_costs
from eyas.engine.cache_pool import CachePool, Place
from eyas.engine.draft_texts import draft_texts
from eyas.engine.generate import GREEDY, Engine
from eyas.engine.logprobs import NotingJudge, TokenLogprob
from eyas.engine.rows import TextRows
from eyas.engine.spans import Spans
from eyas.engine.text import Text
from eyas.engine.together import settle_texts
from eyas.engine.verify import Verdict
from eyas.errors import InputError
from eyas.progress import say
from eyas.settings import SamplingSettings

CHUNK = 128
"""Prompt rows between two rounds of the other texts."""
End = Literal["done", "halted", "cancelled", "refused", "failed"]


class Reader(Protocol):
    """Who is told of a text as it is made, in the engine's thread: it must not block."""

    def tokens(self, verdict: Verdict, notes: Sequence[TokenLogprob]) -> bool:
        """These tokens were emitted, with a note for each where they were asked for. True: the text is to end here."""
        ...

    def ended(self, end: End, outcome: "Outcome | None", error: str | None) -> None:
        """Nothing more follows: `done` (see outcome's finish), `halted` (as `tokens` asked), `cancelled`, `refused` or
        `failed` (see `error`)."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """A request for one text. `num_steps` levels drafted a round at most; `stop_ids` join the target's own."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    reader: Reader
    num_steps: int = 0
    ignore_eos: bool = False
    sampling: SamplingSettings = GREEDY
    stop_ids: Collection[int] = ()
    logprobs: int | None = None
    """Notes with so many of the likeliest tokens; None: no notes."""
    since: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Outcome:
    """What became of a text, as far as it came. Seconds are since the request was made."""

    prompt_tokens: int
    cached_tokens: int
    ids: tuple[int, ...]
    finish: str | None
    rounds: tuple[int, ...]
    """Drafted tokens accepted in each round that drafted, before any cut."""
    drafted: int
    plain_rounds: int
    valid: bool
    seconds_queued: float
    seconds_first: float | None
    seconds: float


@dataclass
class Totals:
    """Sums since the start, for /metrics. Written by the engine's thread, read by others."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    rounds: int = 0
    drafted_rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    forwards: int = 0
    prefill_seconds: float = 0.0
    ends: dict[str, int] = field(default_factory=dict)

    def count(self, verdict: Verdict, depth: int, nodes: int) -> None:
        self.rounds += 1
        self.generation_tokens += len(verdict.tokens)
        if nodes == 0:
            return
        self.drafted_rounds += 1
        self.drafted_tokens += nodes
        self.accepted_tokens += verdict.accepted
        self.accepted_at += [0] * (depth - len(self.accepted_at))
        for level in range(verdict.accepted):
            self.accepted_at[level] += 1


@dataclass(eq=False)
class Seat:
    """A text that has its cache rows."""

    job: Job
    text: Text
    place: Place
    notes: NotingJudge | None
    admitted: float
    drafted: int = 0

    @property
    def prefilled(self) -> bool:
        return bool(self.text.ids)


class Scheduler:
    """Takes jobs further, all of them a little at every `step`.

    `most` texts have rows at a time, of `cache_rows` rows in all. The engine is used from one thread alone.
    """

    def __init__(self, engine: Engine, *, cache_rows: int, most: int = 16) -> None:
        # A trace is of one text at a time.
        self.engine, self.most = engine, most if engine.trace is None else 1
        self.chunk = max(CHUNK, engine.forward.grain)
        settle_texts(engine.forward, self.most)
        costs = batch_costs(engine, self.most)
        self.costs = [] if costs is None else [costs.of(texts) for texts in range(1, self.most + 1)]
        """What a round of 1, 2, ... texts costs; none where every text's is that of a lone run."""
        engine.spans = self.spans = Spans()
        self.pool = CachePool(cache_rows, engine.forward.grain, engine.forward.cache.dtype, engine.target.model.device)
        self.waiting: deque[Job] = deque()
        self.seats: list[Seat] = []
        self.totals = Totals()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.seats

    @property
    def jobs(self) -> list[Job]:
        """All that have not ended."""
        return [*self.waiting, *(seat.job for seat in self.seats)]

    def forget(self) -> None:
        """Count from zero, as at the start."""
        self.totals = Totals()
        self.engine.spans = self.spans = Spans()

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def cancel(self, job: Job) -> None:
        """The text is not wanted any more; nothing happens if it is done already."""
        if job in self.waiting:
            self.waiting.remove(job)
            self._tell(job, "cancelled", None)
        for seat in [seat for seat in self.seats if seat.job is job]:
            self._leave(seat, "cancelled")

    @torch.inference_mode()
    def step(self) -> None:
        """Admit, one chunk of one prompt, one round of every text."""
        while self.waiting and len(self.seats) < self.most and self._admit(self.waiting[0]):
            self.waiting.popleft()
        waiting = next((seat for seat in self.seats if not seat.prefilled), None)
        if waiting is not None:
            self._prefill(waiting)
        self._rounds([seat for seat in self.seats if seat.prefilled])

    def fail(self, error: str) -> None:
        """Nothing can go on: everyone is told."""
        for job in self.jobs:
            self._tell(job, "failed", None, error)
        self.waiting.clear()
        self.seats.clear()

    def _admit(self, job: Job) -> bool:
        """Whether the job left the queue: it has a seat, or is refused. False while rows are lacking."""
        engine = self.engine
        try:
            text = engine.prepare(job.prompt, job.max_new_tokens, job.num_steps, job.ignore_eos, job.sampling)
        except InputError as error:
            self._tell(job, "refused", None, f"wanted {error.wanted}; got {error.got}")
            return True
        text.stop_ids |= frozenset(job.stop_ids)
        rows = engine.rows_of(text)
        if not self.pool.fits(rows):
            self._tell(job, "refused", None, f"{rows} cache rows are needed, of {self.pool.budget} in all")
            return True
        place = self.pool.take(job.prompt, rows)
        if place is None:
            return False
        if text.proposer is not None:
            text.proposer = text.proposer.fork()
            text.proposer.reserve(rows)
        notes = None
        if job.logprobs is not None:
            text.judge = notes = NotingJudge(text.judge, job.logprobs)
        self.totals.prompt_tokens += len(job.prompt)
        self.seats.append(Seat(job, text, place, notes, time.perf_counter()))
        return True

    def _prefill(self, seat: Seat) -> None:
        started = time.perf_counter()
        forward, place, prompt = self.engine.forward, seat.place, seat.text.prompt
        if place.filled == 0:
            self.pool.share(place)
            self.totals.cached_tokens += place.reused
            if self.engine.trace is not None:
                self.engine.trace.begin()
        forward.cache = place.cache
        end = min((place.filled // self.chunk + 1) * self.chunk, len(prompt))
        state, taps = forward.prefill(prompt[:end], place.filled)
        place.filled = end
        if taps is not None:
            place.taps.append(taps)
        if end == len(prompt):
            whole = torch.cat(place.taps, dim=1) if place.taps else None
            with self._alone(seat):
                verdict = self.engine.first(seat.text, forward.logits(state), whole)
                self.totals.generation_tokens += len(verdict.tokens)
                self._told(seat, verdict)
        self.totals.prefill_seconds += time.perf_counter() - started

    def _rounds(self, seats: Sequence[Seat]) -> None:
        """One round of every text: all draft, one forward verifies (or one each, where rows do not go side by side)."""
        if not seats:
            return
        engine, texts, forward = self.engine, [seat.text for seat in seats], self.engine.forward
        self.spans.start()
        for proposer in (text.proposer for text in texts):
            if isinstance(proposer, AdaptiveProposer):
                # of all that have a seat: texts whose prompts go on stand beside these a few turns later
                proposer.price(self.costs[len(self.seats) - 1] if self.costs else proposer.costs, len(self.seats))
        trees = draft_texts(texts)
        self.spans.lap("draft")
        rows = [
            TextRows(seat.place.cache, [seat.text.last, *tree.tokens], seat.text.position, tree.row_parents)
            for seat, tree in zip(seats, trees, strict=True)
        ]
        lanes = forward.verify_texts(rows)
        self.totals.forwards += -(-len(seats) // (forward.together or len(seats)))
        for seat, tree, (logits_RV, verified) in zip(seats, trees, lanes, strict=True):
            self.spans.lap("verify")
            with self._alone(seat):
                verdict = engine.decide(seat.text, tree, logits_RV, verified)
                seat.drafted += len(tree.tokens)
                self.totals.count(verdict, tree.depth, len(tree.tokens))
                self._told(seat, verdict)
            self.spans.lap("host")

    @contextmanager
    def _alone(self, seat: Seat) -> Generator[None]:
        """What goes wrong while one text's tokens are chosen ends that text and no other: nothing is shared there."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a fault nobody thought of, told to its client and to the log
            say(traceback.format_exc())
            if seat in self.seats:
                self._leave(seat, "failed", f"{type(error).__name__}: {error}")

    def _told(self, seat: Seat, verdict: Verdict) -> None:
        """Hand on what was emitted; leave where the text is over."""
        notes = [] if seat.notes is None else seat.notes.notes[-len(verdict.tokens) :]
        halted = seat.job.reader.tokens(verdict, notes)
        if seat.text.finish is not None:
            self._leave(seat, "done")
        elif halted:
            self._leave(seat, "halted")

    def _leave(self, seat: Seat, end: End, error: str | None = None) -> None:
        self.seats.remove(seat)
        self.pool.release(seat.place)
        self._tell(seat.job, end, _outcome(seat), error)

    def _tell(self, job: Job, end: End, outcome: Outcome | None, error: str | None = None) -> None:
        self.totals.ends[end] = self.totals.ends.get(end, 0) + 1
        job.reader.ended(end, outcome, error)


def _outcome(seat: Seat) -> Outcome:
    text, since = seat.text, seat.job.since
    drafted = [verdict.accepted for verdict, depth in zip(text.rounds, text.depths, strict=True) if depth]
    return Outcome(
        prompt_tokens=len(text.prompt),
        cached_tokens=seat.place.reused,
        ids=tuple(text.ids),
        finish=text.finish,
        rounds=tuple(drafted),
        drafted=seat.drafted,
        plain_rounds=len(text.rounds) - len(drafted),
        valid=text.judge.valid,
        seconds_queued=seat.admitted - since,
        seconds_first=text.clock[1] - since if len(text.clock) > 1 else None,
        seconds=time.perf_counter() - since,
    )
