"""Batched decoding of many prompts: cohorts of rows with a static cache each, finished rows replaced at once.

A cohort is a few prompts of similar length, prefilled together. Its caches are right-aligned, so that all its rows
write the same column at each step and attention reads views, never copies. The linear layers see the rows of all
cohorts as one batch; only attention is taken cohort by cohort. When enough rows are free the next cohort comes in.

Shapes: R rows, T prompt columns, N query heads, K key/value heads, E head width, C cache columns, V vocabulary.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig, LogitsProcessor

from eyas.data.sampling import Sampler
from eyas.models.target import Target

ATTENTION = "eyas_cohorts"
UNSUPPORTED = (TypeError, KeyError, AttributeError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Request:
    """A prompt to answer. `key` seeds its sampling, so it must be the prompt's own."""

    key: str
    ids: list[int]
    max_new_tokens: int
    tag: Any = None


@dataclass(frozen=True)
class Answer:
    """`ids` end with a stop token iff `finish` is "stop"; else they were cut at the limit ("length")."""

    request: Request
    ids: list[int]
    finish: str


class Queue(Protocol):
    """Where requests come from; more may be added while answers are being read."""

    def take(self, count: int) -> list[Request]:
        """At most `count` requests of similar prompt length; none means none is waiting."""
        ...


@dataclass
class Row:
    """One answer in the making."""

    request: Request
    uniforms: list[float]
    ids: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the newest token."""
        return len(self.request.ids) + len(self.ids) - 1


class Cohort:
    """Rows prefilled together and their caches, [R, K, C, E] a layer; `length` columns are filled, the same for all."""

    def __init__(self, requests: list[Request], sampler: Sampler) -> None:
        self.rows = [Row(request, sampler.uniforms(request.key, request.max_new_tokens)) for request in requests]
        self.prompts = [len(request.ids) for request in requests]
        self.length = max(self.prompts)
        self.capacity = self.length + max(request.max_new_tokens for request in requests)
        self.pads = torch.tensor([self.length - prompt for prompt in self.prompts])
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Prefill: causal attention over right-padded prompts (a real row never sees a pad); fills the caches."""
        self.keys[layer], self.values[layer] = self._align(key), self._align(value)
        mask = None
        if window is not None and query.shape[2] > window:
            row = torch.arange(query.shape[2])
            mask = (row[:, None] >= row) & (row[:, None] - row < window)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )

    def _align(self, state_RKTE: Tensor) -> Tensor:
        """Right-padded prompt states into a right-aligned cache; unused columns on the left are zero, not garbage,
        for a masked NaN still poisons the sum."""
        rows, heads, columns, width = state_RKTE.shape
        cache = state_RKTE.new_empty(rows, heads, self.capacity, width)
        for row, prompt in enumerate(self.prompts):
            cache[row, :, : columns - prompt] = 0
            cache[row, :, columns - prompt : columns] = state_RKTE[row, :, :prompt]
        return cache

    def step(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Decode: one new column for every live row. query [R, N, 1, E]; returns [R, N, 1, E]."""
        rows, heads, _, width = query.shape
        keys, values = self.keys[layer], self.values[layer]
        keys[:rows, :, self.length] = key[:, :, 0]
        values[:rows, :, self.length] = value[:, :, 0]
        first, stop = max(0, self.length + 1 - window) if window else 0, self.length + 1
        # The query heads of one key/value head stand as rows of one product, so no key is repeated.
        context = F.scaled_dot_product_attention(
            query.reshape(rows, keys.shape[1], -1, width),
            keys[:rows, :, first:stop],
            values[:rows, :, first:stop],
            attn_mask=None if mask is None else mask[..., first:stop],
            scale=scale,
        )
        return context.reshape(rows, heads, 1, width)

    def mask(self) -> Tensor | None:
        """[R, 1, 1, length + 1], false at the pads; None where there are none."""
        pads = self.pads[: len(self.rows)]
        if not pads.any():
            return None
        return (torch.arange(self.length + 1) >= pads[:, None])[:, None, None]

    @torch.inference_mode()
    def drop(self, row: int) -> None:
        """Take a finished row out: the last one moves into its place. Caches of a cohort that is half done are cut, for
        its last rows may outlive many other cohorts."""
        last = len(self.rows) - 1
        if row != last:
            for cache in (*self.keys.values(), *self.values.values()):
                cache[row, :, : self.length] = cache[last, :, : self.length]
            self.pads[row] = self.pads[last]
            self.rows[row] = self.rows[last]
        self.rows.pop()
        if self.rows and 2 * len(self.rows) <= len(next(iter(self.keys.values()))):
            for caches in (self.keys, self.values):
                for layer, cache in caches.items():
                    caches[layer] = cache[: len(self.rows)].clone()


@dataclass
class Step:
    """One decoding step of all cohorts, seen by the attention function through the forward's keyword arguments."""

    cohorts: list[Cohort]

    def __post_init__(self) -> None:
        self.masks = [cohort.mask() for cohort in self.cohorts]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        sizes = [len(cohort.rows) for cohort in self.cohorts]
        parts = zip(self.cohorts, self.masks, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        return torch.cat([cohort.step(layer, q, k, v, scale, window, mask) for cohort, mask, q, k, v in parts])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cohort: Cohort | Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: heads in [R, N, T, E], out [R, T, N, E]."""
    if softcap is not None or s_aux is not None or cohort is None:
        raise NotImplementedError("attention with soft-cap or sinks")
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cohort.attend(layer, query, key, value, scale, sliding_window).transpose(1, 2), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


@contextmanager
def cohort_attention(target: Target) -> Generator[None, None, None]:
    """The target's attention goes through `cohort.attend` inside the block."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    before = target.config._attn_implementation
    target.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        target.config._attn_implementation = before


def prefill(target: Target, cohort: Cohort) -> Tensor:
    """Logits [R, V] of each prompt's last token; the cohort's caches are filled."""
    ids = torch.zeros(len(cohort.rows), cohort.length, dtype=torch.int64)
    for row, item in enumerate(cohort.rows):
        ids[row, : cohort.prompts[row]] = torch.tensor(item.request.ids)
    hidden = target.backbone(input_ids=ids, use_cache=False, cohort=cohort).last_hidden_state
    last = torch.tensor(cohort.prompts) - 1
    return target.logits(hidden[torch.arange(len(cohort.rows)), last])


def decode_step(target: Target, cohorts: list[Cohort]) -> Tensor:
    """Feed every live row's newest token; logits [R, V] over the rows of all cohorts in order."""
    rows = [row for cohort in cohorts for row in cohort.rows]
    ids = torch.tensor([[row.ids[-1]] for row in rows])
    positions = torch.tensor([[row.position] for row in rows])
    step = Step(cohorts)
    hidden = target.backbone(input_ids=ids, position_ids=positions, use_cache=False, cohort=step).last_hidden_state
    for cohort in cohorts:
        cohort.length += 1
    return target.logits(hidden[:, -1])


def decode(
    target: Target,
    queue: Queue,
    sampler: Sampler,
    batch_size: int,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> Iterator[Answer]:
    """Answers as they finish, until the queue is empty. `on_step(tokens)` is told of tokens as they come.

    Works for every causal target: one whose attention is not plain goes row by row through its own generate.
    """
    if not fits_cohorts(target):
        yield from _decode_singly(target, queue, sampler, on_step)
        return
    size = max(1, batch_size // 4)
    cohorts: list[Cohort] = []
    while True:
        started = False
        while batch_size - _live(cohorts) >= size and (requests := queue.take(size)):
            with torch.inference_mode(), cohort_attention(target):
                cohort = Cohort(requests, sampler)
                logits = prefill(target, cohort)
            cohorts.append(cohort)
            on_step(len(requests))
            yield from _advance(target, sampler, [cohort], logits)
            started = True
        cohorts = [cohort for cohort in cohorts if cohort.rows]
        if not cohorts and not started:
            return
        if cohorts:
            with torch.inference_mode(), cohort_attention(target):
                logits = decode_step(target, cohorts)
            on_step(len(logits))
            yield from _advance(target, sampler, cohorts, logits)


def _live(cohorts: list[Cohort]) -> int:
    return sum(len(cohort.rows) for cohort in cohorts)


def _advance(target: Target, sampler: Sampler, cohorts: list[Cohort], logits_RV: Tensor) -> Iterator[Answer]:
    """Append each live row's next token; take out and give the rows that end with it."""
    rows = [row for cohort in cohorts for row in cohort.rows]
    uniforms = [] if sampler.greedy else [row.uniforms[len(row.ids)] for row in rows]
    with torch.inference_mode():
        picked = sampler.pick(logits_RV, uniforms)
    for row, token in zip(rows, picked, strict=True):
        row.ids.append(token)
    for cohort in cohorts:
        for index in reversed(range(len(cohort.rows))):  # backwards: what `drop` moves down was seen already
            if answer := _finished(cohort.rows[index], target.stop_ids):
                cohort.drop(index)
                yield answer


def _finished(row: Row, stop_ids: tuple[int, ...]) -> Answer | None:
    if row.ids[-1] in stop_ids:
        return Answer(row.request, row.ids, "stop")
    if len(row.ids) >= row.request.max_new_tokens:
        return Answer(row.request, row.ids, "length")
    return None


def fits_cohorts(target: Target) -> bool:
    """Whether cohort decoding gives this architecture's own logits, tried on two short prompts of unequal length."""
    prompts = [[5, 9, 3, 14, 8, 2, 11], [7, 4, 12]]
    tokens = [6, 10, 13]
    cohort = Cohort([Request("", [i % target.vocab_size for i in ids], len(tokens) + 1) for ids in prompts], Sampler())
    try:
        with torch.inference_mode():
            with cohort_attention(target):
                got = [prefill(target, cohort)]
                for token in tokens:
                    for row in cohort.rows:
                        row.ids.append(token)
                    got.append(decode_step(target, [cohort]))
            for index, ids in enumerate(prompts):
                whole = target.model(input_ids=torch.tensor([ids + tokens]), use_cache=False).logits[0]
                wanted = whole[len(ids) - 1 :].float()
                difference = (torch.stack([logits[index] for logits in got]).float() - wanted).abs().max()
                tolerance = 1e-3 if target.dtype == torch.float32 else 0.1
                if not difference <= tolerance * wanted.abs().max().clamp(min=1.0):
                    return False
    except UNSUPPORTED:
        return False
    return True


class _Chooser(LogitsProcessor):
    """Makes generate's argmax our sampler's choice."""

    def __init__(self, sampler: Sampler, uniforms: list[float], prompt: int) -> None:
        self.sampler, self.uniforms, self.prompt = sampler, uniforms, prompt

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.sampler.greedy:
            return scores
        chosen = self.sampler.pick(scores, [self.uniforms[input_ids.shape[1] - self.prompt]])
        return torch.full_like(scores, -torch.inf).scatter_(1, torch.tensor([chosen]), 0.0)


def _decode_singly(target: Target, queue: Queue, sampler: Sampler, on_step: Callable[[int], None]) -> Iterator[Answer]:
    """One prompt at a time with the model's own cache (recurrent layers, soft-capped attention and the like)."""
    while requests := queue.take(1):
        request = requests[0]
        prompt = torch.tensor([request.ids])
        uniforms = sampler.uniforms(request.key, request.max_new_tokens)
        config = GenerationConfig(
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=list(target.stop_ids),
            pad_token_id=target.stop_ids[0] if target.stop_ids else 0,
        )
        with torch.inference_mode():
            output: Any = target.model.generate(  # pyrefly: ignore
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                logits_processor=[_Chooser(sampler, uniforms, len(request.ids))],
            )
        ids = output[0, len(request.ids) :].tolist()
        on_step(len(ids))
        yield Answer(request, ids, "stop" if ids[-1] in target.stop_ids else "length")
