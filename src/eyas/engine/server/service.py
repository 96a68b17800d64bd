"""What the routes share: the worker, the target's words, the limits, and requests turned into jobs."""

import asyncio
import hmac
import inspect
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jinja2.exceptions import TemplateError
from starlette.requests import ClientDisconnect, Request
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from eyas.engine.batching import Job
from eyas.engine.server.detokenise import UNFINISHED, bytes_of
from eyas.engine.server.errors import ApiError
from eyas.engine.server.protocol import ChatRequest, CompletionRequest
from eyas.engine.server.stream import AnswerReader, Ending, Piece
from eyas.engine.server.worker import Worker
from eyas.models.target import Target
from eyas.settings import SamplingSettings

MEGABYTE = 2**20
RETRY = {"Retry-After": "1"}
RESERVED = (
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    | inspect.signature(render_jinja_template).parameters.keys()
    | {"messages", "raise_exception", "strftime_now"}
) - {"kwargs"}
"""What renders a template, by name: a template of the client's own, say, could compute without end."""


@dataclass(frozen=True)
class Limits:
    """What one client may ask for, and all together."""

    body_bytes: int = MEGABYTE
    body_seconds: float = 30.0
    output_tokens: int = 2048
    waiting: int = 128
    """Texts that wait for cache rows at most; more are refused with 429."""
    running: int = 16
    """Texts worked on at a time."""


@dataclass
class Service:
    """One target behind the routes. `closing` True refuses new requests."""

    target: Target
    name: str
    worker: Worker
    limits: Limits = Limits()
    num_steps: int = 0
    context: int | None = None
    api_key: str | None = None
    closing: bool = False
    started: float = field(default_factory=time.time)
    open_jobs: int = 0
    """Texts that were submitted and have not ended."""
    refused: dict[int, int] = field(default_factory=dict)
    """Requests that were not served, by status."""

    def __post_init__(self) -> None:
        self._words = ThreadPoolExecutor(1, thread_name_prefix="words")
        self.context = min(self.context or self.target.context_length, self.target.context_length)

    @property
    def most_open(self) -> int:
        return self.limits.waiting + self.limits.running

    @property
    def ready(self) -> bool:
        """Whether a request that came now would be served."""
        return self.worker.alive and not self.closing and self.open_jobs < self.most_open

    def close(self) -> None:
        self.worker.stop()
        self._words.shutdown()

    def check_key(self, request: Request) -> None:
        """Raises ApiError 401 without the key, compared in constant time."""
        if self.api_key is None:
            return
        given = request.headers.get("authorization", "")
        scheme, _, key = given.encode("latin-1").partition(b" ")  # headers are read as latin-1, keys are typed as UTF-8
        right = hmac.compare_digest(key.strip(), self.api_key.encode())
        if scheme.lower() != b"bearer" or not right:
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    async def body(self, request: Request) -> bytes:
        """The whole body. Raises ApiError 413 for more than the limit, 408 for one that does not come."""
        most = self.limits.body_bytes
        too_large = ApiError(413, f"The body is larger than {most} bytes.", code="body_too_large")
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise too_large
        except ClientDisconnect as error:
            raise ApiError(400, "The client left before its body was whole.", code="client_gone") from error
        except TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.", code="body_timeout") from error
        return b"".join(parts)

    def submit(self, job: Job) -> None:
        self.open_jobs += 1
        self.worker.submit(job)

    def cancel(self, job: Job) -> None:
        self.worker.cancel(job)

    def note_refused(self, status: int) -> None:
        self.refused[status] = self.refused.get(status, 0) + 1

    def check_open(self, model: str | None, count: int) -> None:
        """Raises ApiError where no request, or not this many texts, would be served now."""
        if model not in (None, self.name):
            raise ApiError(
                404,
                f"The model `{model}` does not exist; this server has `{self.name}`.",
                code="model_not_found",
                param="model",
            )
        if self.closing or not self.worker.alive:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", headers=RETRY)
        if count > self.most_open:
            running, waiting = self.limits.running, self.limits.waiting
            words = f"{count} texts are asked for (prompts times n); this server has {self.most_open} at a time at most"
            raise ApiError(400, f"{words}: {running} at work, {waiting} waiting.", code="too_many_texts", param="n")
        if self.open_jobs + count > self.most_open:
            words = f"{self.open_jobs} texts are at work or waiting, of {self.most_open} at a time"
            raise ApiError(429, f"{words}: no room for {count} more now.", code="queue_full", headers=RETRY)

    async def chat_prompts(self, ask: ChatRequest) -> list[tuple[int, ...]]:
        return [await self._in_thread(lambda: self._chat_ids(ask))]

    async def completion_prompts(self, ask: CompletionRequest) -> list[tuple[int, ...]]:
        prompt = ask.prompt
        if isinstance(prompt, str):
            texts: list[Any] = [prompt]
        else:
            texts = [prompt] if isinstance(prompt[0], int) else list(prompt)
        return await self._in_thread(lambda: [self._ids(text, ask.add_special_tokens is not False) for text in texts])

    async def _in_thread(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._words, work)

    def _chat_ids(self, ask: ChatRequest) -> tuple[int, ...]:
        tokenizer: Any = self.target.tokenizer
        if tokenizer.chat_template is None:
            raise ApiError(400, "This target has no chat template: use /v1/completions.", code="no_chat_template")
        kwargs = ask.chat_template_kwargs or {}
        if taken := sorted(RESERVED & kwargs.keys()):
            words = (
                f"chat_template_kwargs: `{taken[0]}` is the server's to set, and no variable of the target's template."
            )
            raise ApiError(400, words, code="invalid_value", param=f"chat_template_kwargs.{taken[0]}")
        messages = [{"role": message.role, "content": message.text} for message in ask.messages]
        try:
            text = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=ask.add_generation_prompt is not False and not ask.continue_final_message,
                continue_final_message=bool(ask.continue_final_message),
                **kwargs,
            )
        except (TemplateError, ValueError) as error:  # in the template's own words
            raise _not_taken(f": {error}") from error
        except (TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise _not_taken(" (or the chat_template_kwargs).") from error
        return self._ids(text, special=False)

    def _ids(self, text: Any, special: bool) -> tuple[int, ...]:
        """Raises ApiError for an id the vocabulary lacks, and for a prompt that leaves no room in the context."""
        if isinstance(text, str):
            tokenizer: Any = self.target.tokenizer
            ids = tokenizer(text, add_special_tokens=special, return_attention_mask=False)["input_ids"]
        else:
            ids = text
            self._check_tokens(ids, "prompt")
        if not ids:
            raise ApiError(400, "The prompt is empty: give at least one token.", code="empty_prompt", param="prompt")
        if len(ids) >= (self.context or 0):
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context} tokens; the prompt has {len(ids)}.",
                code="context_length_exceeded",
                param="prompt",
            )
        return tuple(ids)

    def jobs(
        self, ask: ChatRequest | CompletionRequest, prompts: list[tuple[int, ...]]
    ) -> tuple[list[Job], asyncio.Queue[tuple[int, Piece]]]:
        """A job for each prompt and choice (none where nothing new is asked for), and the queue of their pieces.

        Raises ApiError for tokens that the target does not have, and for more new ones than there may be.
        """
        pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        seed = secrets.randbelow(2**62) if ask.seed is None else ask.seed
        self._check_tokens(map(int, ask.logit_bias or ()), "logit_bias")
        self._check_tokens(ask.stop_token_ids or (), "stop_token_ids")
        places = [(prompt, choice) for prompt in prompts for choice in range(ask.choices)]
        if ask.limit == 0:  # the prompt is echoed, and that is all
            for index in range(len(places)):
                pieces.put_nowait((index, Piece(end=Ending("done", "length", None, 0, None, None))))
            return [], pieces
        return [
            self._job(ask, prompt, sampling(ask, seed + choice), pieces, index)
            for index, (prompt, choice) in enumerate(places)
        ], pieces

    def _check_tokens(self, ids: Iterable[int], param: str) -> None:
        """Raises ApiError for an id that the target does not have."""
        size = self.target.vocab_size
        if (most := max(ids, default=0)) >= size:
            words = f"{param}: token {most} is beyond the vocabulary of {size} (0 to {size - 1})."
            raise ApiError(400, words, code="invalid_value", param=param)

    def new_tokens(self, ask: ChatRequest | CompletionRequest, prompt: Sequence[int]) -> int:
        """Tokens of an answer at most. Raises ApiError for more than there may be."""
        most, room = self.limits.output_tokens, (self.context or 0) - len(prompt)
        asked, field = ask.limit, ask.limit_field
        if asked is None:
            return min(ask.usual or room, most, room)
        if asked > room:
            words = f"{field}: {asked} is too large: this model's maximum context length is {self.context} tokens"
            words = f"{words}, of which the prompt has {len(prompt)}: {room} are left."
            raise ApiError(400, words, code="context_length_exceeded", param=field)
        if asked > most:
            words = f"{field}: {asked} is too large: this server's answers have {most} tokens at most (--max-output)."
            raise ApiError(400, words, code="invalid_value", param=field)
        return asked

    def _job(
        self,
        ask: ChatRequest | CompletionRequest,
        prompt: tuple[int, ...],
        settings: SamplingSettings,
        pieces: asyncio.Queue[tuple[int, Piece]],
        index: int,
    ) -> Job:
        def put(piece: Piece) -> None:
            self.open_jobs -= piece.end is not None
            pieces.put_nowait((index, piece))

        def send(piece: Piece) -> None:
            self.worker.leave(partial(put, piece))

        stop_ids = frozenset(ask.stop_token_ids or ())
        reader = AnswerReader(
            self.decode,
            ask.stops,
            frozenset(() if ask.ignore_eos else self.target.stop_ids),
            send,
        )
        return Job(
            prompt=prompt,
            max_new_tokens=self.new_tokens(ask, prompt),
            reader=reader,
            num_steps=self.num_steps if ask.num_steps is None else min(ask.num_steps, self.num_steps),
            ignore_eos=bool(ask.ignore_eos),
            sampling=settings,
            stop_ids=stop_ids,
            logprobs=ask.notes,
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self.target.text(ids)

    def token_text(self, token: int) -> str:
        """One token by itself, special ones too."""
        return self.target.text([token], special=True)

    def token_name(self, token: int) -> str:
        """One token apart from every other: a part of a character by its bytes, as OpenAI's completions had it."""
        text = self.token_text(token)
        return text if UNFINISHED not in text else "bytes:" + "".join(f"\\x{b:02x}" for b in self.token_bytes(token))

    def token_bytes(self, token: int) -> bytes:
        """Of a part of a character the part, which no text shows."""
        tokenizer: Any = self.target.tokenizer
        return bytes_of(self.token_text(token), tokenizer.convert_ids_to_tokens(token))


def _not_taken(why: str) -> ApiError:
    words = f"The target's chat template does not take these messages{why}"
    return ApiError(400, words, code="chat_template", param="messages")


def sampling(ask: ChatRequest | CompletionRequest, seed: int) -> SamplingSettings:
    """The engine's settings of a request; what it leaves out is as OpenAI's: temperature and top-p 1."""
    return SamplingSettings(
        temperature=1.0 if ask.temperature is None else ask.temperature,
        top_p=1.0 if ask.top_p is None else ask.top_p,
        top_k=max(ask.top_k or 0, 0),
        min_p=ask.min_p or 0.0,
        repetition_penalty=1.0 if ask.repetition_penalty is None else ask.repetition_penalty,
        presence_penalty=ask.presence_penalty or 0.0,
        frequency_penalty=ask.frequency_penalty or 0.0,
        logit_bias=ask.logit_bias or {},
        seed=seed,
    )
