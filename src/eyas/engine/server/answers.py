"""Answers in OpenAI's shapes, whole and streamed, chat and completion."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from eyas.engine.batching import Job, Outcome
from eyas.engine.logprobs import TokenLogprob
from eyas.engine.server.errors import ApiError
from eyas.engine.server.protocol import ChatRequest, CompletionRequest
from eyas.engine.server.service import Service
from eyas.engine.server.stream import Ending, Piece

Json = dict[str, Any]
Pieces = asyncio.Queue[tuple[int, Piece]]
ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass
class Choice:
    """One answer as far as it came."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    notes: list[TokenLogprob] = field(default_factory=list)
    accepted: list[list[Any]] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.ids += piece.ids
        self.notes += piece.notes
        self.accepted += marks(piece)
        self.ending = piece.end or self.ending


def marks(piece: Piece) -> list[list[Any]]:
    """Text a token, and whether the token was drafted."""
    marked = [[text, accepted] for text, accepted in zip(piece.texts, piece.accepted, strict=True)]
    return [*marked, [piece.rest, False]] if piece.rest else marked


def meta_info(outcome: Outcome | None, ending: Ending) -> Json:
    """What speculation did, under SGLang's names; `accept_length` is ours (docs/words.md), None without a round."""
    if outcome is None:
        return {}
    rounds, deepest = outcome.rounds, max(outcome.rounds, default=0)
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": ending.tokens,
        "cached_tokens": outcome.cached_tokens,
        "e2e_latency": round(outcome.seconds, 6),
        "queue_time": round(outcome.seconds_queued, 6),
        "first_token_latency": None if outcome.seconds_first is None else round(outcome.seconds_first, 6),
        "spec_verify_ct": len(rounds),
        "spec_num_correct_drafts": sum(rounds),
        "spec_num_proposed_drafts": outcome.drafted,
        "spec_correct_drafts_histogram": [rounds.count(count) for count in range(deepest + 1)] if rounds else [],
        "plain_rounds": outcome.plain_rounds,
        "accept_length": 1 + sum(rounds) / len(rounds) if rounds else None,
        "valid": outcome.valid,
    }


class Shape:
    """How one kind of request is answered."""

    whole: str
    part: str
    prefix: str

    def __init__(self, ask: ChatRequest | CompletionRequest, service: Service, prompts: Sequence[tuple[int, ...]]):
        self.ask, self.service, self.prompts = ask, service, prompts
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.name}

    def usage(self, choices: Sequence[Choice]) -> Json:
        prompt = sum(map(len, self.prompts))
        completion = sum(len(choice.ids) for choice in choices)
        ends = [choice.ending.outcome for choice in choices if choice.ending is not None]
        cached = max((outcome.cached_tokens for outcome in ends if outcome is not None), default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def answer(self, choices: Sequence[Choice]) -> Json:
        listed = [self._extra(index, choice, self.choice(choice)) for index, choice in enumerate(choices)]
        return {**self.head(self.whole), "choices": listed, "usage": self.usage(choices)}

    def event(self, index: int, piece: Piece, choices: Sequence[Choice]) -> Json:
        """One event of a stream."""
        choice = {"index": index, **self.delta(piece, index), "finish_reason": piece.end.finish if piece.end else None}
        if self.ask.return_token_ids:
            choice["token_ids"] = list(piece.ids)
        if self.ask.mark_accepted:
            choice["accepted"] = marks(piece)
        if piece.end is not None:
            choice |= {"stop_reason": piece.end.stop, "meta_info": meta_info(piece.end.outcome, piece.end)}
        event = {**self.head(self.part), "choices": [choice]}
        options = self.ask.stream_options
        if options is not None and options.continuous_usage_stats:
            event["usage"] = self.usage(choices)
        return event

    def _extra(self, index: int, choice: Choice, words: Json) -> Json:
        ending = choice.ending
        assert ending is not None, "an answer is given when all have ended"
        told = {"index": index, **words, "finish_reason": ending.finish, "stop_reason": ending.stop}
        told["meta_info"] = meta_info(ending.outcome, ending)
        if self.ask.return_token_ids:
            told["token_ids"] = choice.ids
            told["prompt_token_ids"] = list(self.prompts[index // self.ask.choices])
        if self.ask.mark_accepted:
            told["accepted"] = choice.accepted
        return told

    def begin(self, index: int) -> Json | None:
        """An event before the first text."""
        return None

    def choice(self, choice: Choice) -> Json:
        raise NotImplementedError

    def delta(self, piece: Piece, index: int) -> Json:
        raise NotImplementedError


class ChatShape(Shape):
    """/v1/chat/completions."""

    whole, part, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice.notes)}

    def begin(self, index: int) -> Json:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return {**self.head(self.part), "choices": [choice]}

    def delta(self, piece: Piece, index: int) -> Json:
        delta = {"content": piece.text} if piece.text else {}
        return {"delta": delta, "logprobs": self._logprobs(piece.notes) if piece.notes else None}

    def _logprobs(self, notes: Sequence[TokenLogprob]) -> Json | None:
        if self.ask.notes is None:
            return None

        def one(token: int, logprob: float) -> Json:
            bytes_ = list(self.service.token_bytes(token))
            return {"token": self.service.token_text(token), "logprob": logprob, "bytes": bytes_}

        content = [
            {**one(note.token, note.logprob), "top_logprobs": [one(*likely) for likely in note.top]} for note in notes
        ]
        return {"content": content, "refusal": None}


class CompletionShape(Shape):
    """/v1/completions."""

    whole, part, prefix = "text_completion", "text_completion", "cmpl"

    def answer(self, choices: Sequence[Choice]) -> Json:
        for index, choice in enumerate(choices):
            choice.text = self._echo(index) + choice.text
        return super().answer(choices)

    def choice(self, choice: Choice) -> Json:
        return {"text": choice.text, "logprobs": self._logprobs(choice.notes)}

    def begin(self, index: int) -> Json | None:
        text = self._echo(index)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return {**self.head(self.part), "choices": [choice]} if text else None

    def delta(self, piece: Piece, index: int) -> Json:
        return {"text": piece.text, "logprobs": self._logprobs(piece.notes) if piece.notes else None}

    def _echo(self, index: int) -> str:
        assert isinstance(self.ask, CompletionRequest), "echo is a completion's"
        return self.service.decode(self.prompts[index // self.ask.choices]) if self.ask.echo else ""

    def _logprobs(self, notes: Sequence[TokenLogprob]) -> Json | None:
        if self.ask.notes is None:
            return None
        texts = [self.service.token_text(note.token) for note in notes]
        offsets = [0]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        tops = [{self.service.token_name(token): value for token, value in note.top} for note in notes]
        return {
            "tokens": [self.service.token_name(note.token) for note in notes],
            "token_logprobs": [note.logprob for note in notes],
            "top_logprobs": tops if self.ask.notes else None,
            "text_offset": offsets[:-1],
        }


class Answering(Response):
    """Runs jobs, one a choice or none at all, and sends what they bring; a client that goes away cancels them within
    one round."""

    def __init__(self, service: Service, shape: Shape, jobs: Sequence[Job], pieces: Pieces, stream: bool) -> None:
        super().__init__()
        self.service, self.shape, self.jobs, self.pieces, self.stream = service, shape, jobs, pieces, stream
        self.choices = [Choice() for _ in range(len(shape.prompts) * shape.ask.choices)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for job in self.jobs:
            self.service.submit(job)
        way = self._stream if self.stream else self._whole
        work = asyncio.ensure_future(way(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            for job, choice in zip(self.jobs, self.choices, strict=bool(self.jobs)):
                if choice.ending is None:
                    self.service.cancel(job)

    async def _arriving(self) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of all choices as they come. Raises ApiError for one that was refused or failed."""
        while any(choice.ending is None for choice in self.choices):
            index, piece = await self.pieces.get()
            self.choices[index].add(piece)
            if piece.end is not None and piece.end.finish is None:
                raise _failure(piece.end)
            yield index, piece

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for _ in self._arriving():
                pass
            response = JSONResponse(self.shape.answer(self.choices))
        except ApiError as error:
            self.service.note_refused(error.status)
            response = error.response
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        begun = [False] * len(self.choices)
        started = False
        try:
            async for index, piece in self._arriving():
                if not started:  # only now: what is refused before its first token has a status of its own
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                if not begun[index] and (first := self.shape.begin(index)) is not None:
                    await _event(send, first)
                begun[index] = True
                if piece.text or piece.end is not None or piece.notes or piece.ids:
                    await _event(send, self.shape.event(index, piece, self.choices))
            options = self.shape.ask.stream_options
            if options is not None and options.include_usage:
                last = {**self.shape.head(self.shape.part), "choices": [], "usage": self.shape.usage(self.choices)}
                await _event(send, last)
        except ApiError as error:
            self.service.note_refused(error.status)
            if not started:
                await error.response(scope, receive, send)
                return
            await _event(send, error.body)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _failure(end: Ending) -> ApiError:
    if end.end == "refused":
        return ApiError(400, end.error or "refused", code="refused")
    if end.end == "cancelled":
        return ApiError(503, "The server is shutting down.", code="shutting_down")
    return ApiError(500, f"The engine failed: {end.error}", code="engine_failed")


async def _event(send: Send, words: Json) -> None:
    await send({"type": "http.response.body", "body": f"data: {ENCODE(words)}\n\n".encode(), "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
