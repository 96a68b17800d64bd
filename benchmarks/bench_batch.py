"""Several texts in one scheduler, plain against speculative, paired in one process; writes bench/out/batch.json.

    python benchmarks/bench_batch.py --draft shipped [--streams 8,4,2,1] [--rounds 6] [--tokens 64] [--dtype bfloat16]
    python benchmarks/bench_batch.py --draft shipped --simulate 0.75,0.45,0.3

No HTTP: what is left is the engine's thread. Every round decodes the same prompts plainly and with the draft, the order
alternating; each way's seconds are told by phase, a turn being a round of every text. `--simulate` accepts by a
survival curve, as a draft so good would. `--own-ends`: texts end where the target ends them, as clients' do. `--cpu`
compares processor seconds, where others use the machine.
"""

import argparse
import gc
import json
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.batching import End, Job, Outcome, Scheduler
from eyas.engine.generate import Engine
from eyas.engine.logprobs import TokenLogprob
from eyas.engine.verify import Verdict
from eyas.measure.prompts import load_test_set
from eyas.models.checkpoint import load_draft
from eyas.models.target import DEFAULT_TARGET, load_target
from eyas.run import machine, versions
from eyas.settings import DraftingSettings
from eyas.shipped import draft_folder

OUT = Path("bench/out/batch.json")
Json = dict[str, Any]


class Reader:
    """Keeps the ids."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def tokens(self, verdict: Verdict, notes: Sequence[TokenLogprob]) -> bool:
        self.ids += verdict.tokens
        return False

    def ended(self, end: End, outcome: Outcome | None, error: str | None) -> None:
        assert end == "done", f"{end}: {error}"


def once(scheduler: Scheduler, prompts: Sequence[list[int]], options: argparse.Namespace, num_steps: int) -> Json:
    """All prompts at once: seconds, of which by phase, and what was emitted."""
    clock = time.thread_time if options.cpu else time.perf_counter
    readers = [Reader() for _ in prompts]
    scheduler.forget()
    gc.collect()
    faults, turns = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 0
    started = clock()
    for ids, reader in zip(prompts, readers, strict=True):
        scheduler.submit(Job(tuple(ids), options.tokens, reader, num_steps, ignore_eos=not options.own_ends))
    while not scheduler.idle:
        scheduler.step()
        turns += 1
    seconds = clock() - started
    totals = scheduler.totals
    phases = {"prefill": totals.prefill_seconds, **scheduler.spans.seconds}
    return {
        "seconds": seconds,
        "tokens": sum(len(reader.ids) for reader in readers),
        "turns": turns,
        "rounds": totals.rounds,
        "drafted_rounds": totals.drafted_rounds,
        "accepted": totals.accepted_tokens,
        "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
        "phases": phases,
        "ids": [reader.ids for reader in readers],
    }


def streams(engine: Engine, prompts: Sequence[list[int]], options: argparse.Namespace) -> Json:
    scheduler = Scheduler(engine, cache_rows=len(prompts) * 1024, most=options.most)
    ways: dict[str, list[Json]] = {"plain": [], "speculative": []}
    for _ in range(options.warm):
        once(scheduler, prompts, options, 0)
        once(scheduler, prompts, options, engine.num_steps)
    for index in range(options.rounds):
        for way in sorted(ways, reverse=bool(index % 2)):
            ways[way].append(once(scheduler, prompts, options, 0 if way == "plain" else engine.num_steps))
    pairs = [
        (spec["tokens"] / spec["seconds"]) / (plain["tokens"] / plain["seconds"])
        for plain, spec in zip(ways["plain"], ways["speculative"], strict=True)
    ]
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
    found: Json = {"speculative over plain": {"median": middle, "low": low, "high": high, "pairs": pairs}}
    found["same"] = engine.drafting.simulate is not None or all(
        spec["ids"] == plain["ids"] for plain, spec in zip(ways["plain"], ways["speculative"], strict=True)
    )
    for way, runs in ways.items():
        turns = sum(run["turns"] for run in runs)
        found[way] = {
            "tokens_s": sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs),
            "ms_a_turn": 1000 * sum(run["seconds"] for run in runs) / turns,
            "phases_ms_a_turn": {
                name: round(1000 * sum(run["phases"].get(name, 0.0) for run in runs) / turns, 4)
                for name in runs[0]["phases"]
            },
            **{
                name: [run[name] for run in runs]
                for name in ("turns", "rounds", "drafted_rounds", "accepted", "page_faults")
            },
            "seconds": [run["seconds"] for run in runs],
        }
    if isinstance(engine.proposer, AdaptiveProposer):
        found["arms"] = {
            name: {"gained": arm.survival.gained(engine.num_steps), "patience": arm.patience}
            for name, arm in engine.proposer.arms.items()
        }
        found["costs"] = dict(scheduler.costs[len(prompts) - 1].draft) if scheduler.costs else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="shipped")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", default="8")
    parser.add_argument("--most", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--ngram", type=int, default=0)
    parser.add_argument("--simulate")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--own-ends", action="store_true")
    options = parser.parse_args()
    target = load_target(options.target, dtype=options.dtype)
    draft, _ = load_draft(draft_folder(options.draft), target.embedding, target.dtype)
    curve = tuple(map(float, options.simulate.split(","))) if options.simulate else None
    drafting = DraftingSettings(num_steps=options.num_steps, adaptive=True, ngram=options.ngram, simulate=curve)
    engine = Engine(target, draft, drafting=drafting)
    tokenizer: Any = target.tokenizer
    rows = load_test_set()
    found: Json = {"options": vars(options), "machine": machine(), "versions": versions(), "streams": {}}
    for count in map(int, options.streams.split(",")):
        texts = [
            tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
            for row in rows[:: len(rows) // count][:count]
        ]
        prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        found["streams"][count] = told = streams(engine, prompts, options)
        print(count, json.dumps(told, indent=1))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
