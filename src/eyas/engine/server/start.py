"""From the command line to an engine that has answered once."""

from argparse import Namespace
from collections.abc import Sequence

import psutil
import torch

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.batching import End, Job, Outcome, Scheduler
from eyas.engine.generate import Engine
from eyas.engine.logprobs import TokenLogprob
from eyas.engine.precision import load_to_decode
from eyas.engine.verify import Verdict
from eyas.launch.own_lines import phase_line
from eyas.models.checkpoint import look_at
from eyas.models.fitting import load_fitting
from eyas.progress import say
from eyas.settings import DraftingSettings
from eyas.shipped import draft_folder

MEMORY_SHARE = 0.5
"""Of the memory that is free once the weights are loaded, for the cache."""
WARM_UP_TOKENS = 8


def start(arguments: Namespace) -> Scheduler:
    """All that comes before requests. Raises InputError as `load`."""
    engine = load(arguments)
    say(phase_line("kv_cache"))
    rows = arguments.cache_rows or free_rows(engine, arguments.max_running)
    scheduler = Scheduler(engine, cache_rows=rows, most=arguments.max_running)
    say(f"engine: {rows} cache rows, {arguments.max_running} texts at a time")
    say(phase_line("warmup"))
    warm_up(scheduler)
    return scheduler


def load(arguments: Namespace) -> Engine:
    """Weights, and an engine over them. Raises InputError for what does not load or does not fit."""
    folder = None if arguments.draft is None else draft_folder(arguments.draft)
    if folder is not None:
        look_at(folder)
    say(phase_line("weights"))
    int8 = arguments.dtype == "int8"
    target = load_to_decode(arguments.target, arguments.dtype, trust_remote_code=arguments.trust_remote_code)
    draft = None
    if folder is not None:
        say(phase_line("draft_weights"))
        draft, _ = load_fitting(folder, target)
    say(phase_line("compile"))
    return Engine(target, draft, drafting=drafting_of(arguments), int8=int8, draft_int8=int8)


def drafting_of(arguments: Namespace) -> DraftingSettings:
    """An adaptive depth, unless asked otherwise: throughput never below plain decoding's."""
    drafts = arguments.draft is not None or arguments.ngram > 0
    return DraftingSettings(
        num_steps=arguments.num_steps if drafts else 1,
        topk=arguments.topk,
        num_draft_tokens=arguments.num_draft_tokens,
        stop_below=arguments.stop_below,
        ngram=arguments.ngram,
        adaptive=drafts and not arguments.fixed_depth,
    )


def free_rows(engine: Engine, running: int) -> int:
    """Cache rows that a share of the free memory holds, whole length blocks, at most the context for every text."""
    cache, block = engine.forward.cache, engine.forward.cache.block
    buffers = (*cache.keys.values(), *cache.values.values())
    assert buffers, "the self-test filled a cache"
    row_bytes = sum(buffer.nbytes for buffer in buffers) / cache.capacity
    device = engine.target.model.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    wanted = running * (engine.target.context_length + block)
    return max(1, min(wanted, int(free * MEMORY_SHARE / row_bytes)) // block) * block


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
    prompt = tuple(torch.randint(size, (16,), generator=torch.Generator().manual_seed(0)).tolist())
    for num_steps in {0, engine.num_steps if engine.proposer is not None else 0}:
        scheduler.submit(Job(prompt, WARM_UP_TOKENS, _Silent(), num_steps, ignore_eos=True))
    while not scheduler.idle:
        scheduler.step()
    scheduler.forget()
    if isinstance(engine.proposer, AdaptiveProposer):
        engine.proposer.forget()
