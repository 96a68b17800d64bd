"""From the command line to an engine that has answered once."""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.batching import End, Job, Outcome, Scheduler
from eyas.engine.cache import LENGTH_BLOCK, attended_length
from eyas.engine.generate import Engine
from eyas.engine.logprobs import TokenLogprob
from eyas.engine.precision import load_to_decode
from eyas.engine.verify import Verdict
from eyas.errors import InputError
from eyas.launch.own_lines import phase_line
from eyas.models.checkpoint import look_at
from eyas.models.fitting import load_fitting
from eyas.progress import say
from eyas.settings import DraftingSettings
from eyas.shipped import draft_folder

MEMORY_SHARE = 0.5
"""Of the memory that is free once the weights are loaded, for the cache."""
WARM_UP_PROMPT, WARM_UP_TOKENS = 16, 8


def check_cache_rows(arguments: Namespace) -> None:
    """Raises InputError for fewer cache rows than the warm-up takes."""
    least = least_rows(arguments.drafting)
    if arguments.cache_rows is not None and arguments.cache_rows < least:
        raise InputError(
            wanted=f"{least} rows or more: the warm-up's text and a round",
            got=str(arguments.cache_rows),
            where="--cache-rows",
            next=f"--cache-rows {least}, or leave it out",
        )


def least_rows(drafting: DraftingSettings) -> int:
    """Cache rows that the warm-up takes."""
    assert drafting.num_steps is not None, "the command line gives a depth"
    return attended_length(WARM_UP_PROMPT + WARM_UP_TOKENS + drafting.rows(drafting.num_steps) - 1)


def start(arguments: Namespace) -> Scheduler:
    """All that comes before requests. Raises InputError as `load`, and where memory is short for a cache."""
    engine = load(arguments)
    say(phase_line("kv_cache"))
    rows = rows_for(engine, arguments)
    scheduler = Scheduler(engine, cache_rows=rows, most=arguments.max_running)
    say(f"engine: {rows} cache rows, {arguments.max_running} texts at a time")
    say(phase_line("warmup"))
    warm_up(scheduler)
    return scheduler


def load(arguments: Namespace) -> Engine:
    """Weights, and an engine over them. Raises InputError for what does not load or does not fit."""
    folder = None if arguments.draft is None else find_draft(arguments.draft, arguments.drafting.num_steps)
    say(phase_line("weights"))
    int8 = arguments.dtype == "int8"
    target = load_to_decode(arguments.target, arguments.dtype, trust_remote_code=arguments.trust_remote_code)
    draft = None
    if folder is not None:
        say(phase_line("draft_weights"))
        draft, _ = load_fitting(folder, target)
    say(phase_line("compile"))
    return Engine(target, draft, drafting=arguments.drafting, int8=int8, draft_int8=int8)


def find_draft(given: str, num_steps: int | None = None) -> Path:
    """Raises InputError for what is no draft's folder, before any weight is loaded."""
    folder = draft_folder(given)
    if not folder.is_dir():
        raise InputError(
            wanted="a draft's folder, or `shipped`",
            got="no such folder",
            where=str(folder.absolute()),
            next=f"ls {shlex.quote(str(folder.absolute().parent))}; without --draft the target decodes plainly",
            code="model_absent",
        )
    look_at(folder, num_steps)
    return folder


def rows_for(engine: Engine, arguments: Namespace) -> int:
    """Cache rows, whole length blocks: as many as are asked for, else what a share of the free memory holds, at most
    the context for every text. Raises InputError where the memory will not do."""
    cache = engine.forward.cache
    buffers = (*cache.keys.values(), *cache.values.values())
    assert buffers, "the self-test filled a cache"
    row_bytes = sum(buffer.nbytes for buffer in buffers) / cache.capacity
    device = engine.target.model.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    share = int(free * MEMORY_SHARE / row_bytes) // cache.block * cache.block
    wanted = arguments.max_running * attended_length(engine.target.context_length + engine.rows - 1, cache.block)
    rows = arguments.cache_rows or min(wanted, share)
    if not least_rows(arguments.drafting) <= rows <= free / row_bytes:
        raise InputError(
            wanted=f"memory for {rows if arguments.cache_rows else least_rows(arguments.drafting)} cache rows",
            got=f"{free / 2**20:.0f} MiB, which hold {free / row_bytes:.0f}",
            where="--cache-rows",
            next=f"--cache-rows {share}" if share else "free some memory, or serve a smaller target",
            code="memory_short",
        )
    return rows


def context_for(scheduler: Scheduler, asked: int | None) -> int:
    """Tokens a prompt and its answer may have: the target's context, or fewer, as asked for or for want of rows."""
    engine, pool = scheduler.engine, scheduler.pool
    held = pool.budget // LENGTH_BLOCK * LENGTH_BLOCK - engine.rows
    context = min(asked or engine.target.context_length, engine.target.context_length, held)
    if context < (asked or engine.target.context_length):
        why = f"{pool.budget} cache rows hold no more" if context == held else "the target's own"
        say(f"engine: texts have {context} tokens at most, prompt included: {why}")
    return context


class _Silent:
    """A reader that asks for nothing."""

    def tokens(self, verdict: Verdict, notes: Sequence[TokenLogprob]) -> bool:
        return False

    def ended(self, end: End, outcome: Outcome | None, error: str | None) -> None:
        assert end == "done", f"the warm-up {end}: {error}"


def warm_up(scheduler: Scheduler) -> None:
    """A few tokens by every way, so that the first request finds everything warm; nothing of it is counted, nor is what
    a draft was worth on them: they are no text."""
    engine, size = scheduler.engine, scheduler.engine.target.vocab_size
    prompt = tuple(torch.randint(size, (WARM_UP_PROMPT,), generator=torch.Generator().manual_seed(0)).tolist())
    for num_steps in {0, engine.num_steps if engine.proposer is not None else 0}:
        scheduler.submit(Job(prompt, WARM_UP_TOKENS, _Silent(), num_steps, ignore_eos=True))
    while not scheduler.idle:
        scheduler.step()
    scheduler.forget()
    if isinstance(engine.proposer, AdaptiveProposer):
        engine.proposer.forget()
