"""Ways of drafting against plain decoding, paired: accept length, tokens drafted a round, and decode seconds per token.

    python benchmarks/bench_drafting.py --draft DRAFT [--precision bfloat16] [--prompts 12] [--ways chain,tree]
    python benchmarks/bench_drafting.py --per-kind 1 --ways "adaptive,adaptive tree"

Without a draft an untrained one is taken: the worst case of an adaptive depth, told by kind of prompt with --per-kind
(so many of each kind of the test set). Every prompt is decoded plainly and in
every way in turn, so that a busy moment of the machine strikes all alike; read the ratios. `cpu` ones are of processor
seconds, which other processes' turns are no part of; `priced` ones give every round the run's mean price of a round of
its depth, so that a kind differs by what was drafted in it and not by the moment it was timed at.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import torch

from eyas.engine.generate import Engine, Generation
from eyas.formats.taps import default_boundaries
from eyas.measure.prompts import BenchPrompt, bench_prompts
from eyas.measure.stats import accept_length, survival
from eyas.models.checkpoint import load_draft
from eyas.models.draft import Draft
from eyas.models.target import DTYPES, load_target
from eyas.progress import Progress, say
from eyas.recipe import DraftSettings
from eyas.run import machine, versions
from eyas.settings import DraftingSettings
from eyas.training.initialise import draft_config

DEPTH = 4
CHAIN = DraftingSettings(num_steps=DEPTH)
TREE = DraftingSettings(num_steps=DEPTH, topk=4, num_draft_tokens=8)
WAYS = {
    "chain of 1": DraftingSettings(num_steps=1),
    "chain of 2": DraftingSettings(num_steps=2),
    "chain": CHAIN,
    "unsure 0.1": CHAIN.model_copy(update={"stop_below": 0.1}),
    "unsure 0.3": CHAIN.model_copy(update={"stop_below": 0.3}),
    "unsure 0.5": CHAIN.model_copy(update={"stop_below": 0.5}),
    "tree": TREE,
    "tree unsure 0.1": TREE.model_copy(update={"stop_below": 0.1}),
    "ngram": CHAIN.model_copy(update={"ngram": 3}),
    "adaptive": CHAIN.model_copy(update={"adaptive": True}),
    "adaptive ngram": CHAIN.model_copy(update={"adaptive": True, "ngram": 3}),
    "adaptive tree": TREE.model_copy(update={"adaptive": True}),
}


@dataclass(frozen=True)
class Pair:
    """A prompt's plain text and the drafted one, and the processor seconds of their rounds."""

    plain: Generation
    fast: Generation
    plain_cpu: list[float]
    fast_cpu: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--target", default="smollm2-135m-instruct-q4")
    parser.add_argument("--precision", default="bfloat16", choices=[*DTYPES, "int8"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--per-kind", type=int, help="so many prompts of every kind, in place of --prompts")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path, default=Path("bench/out/drafting.json"))
    given = parser.parse_args()
    int8 = given.precision == "int8"
    target = load_target(given.target, dtype="bfloat16" if int8 else given.precision)
    if given.draft:
        draft = load_draft(given.draft, target.embedding, target.dtype)[0]
    else:
        torch.manual_seed(0)
        draft = Draft(draft_config(target, default_boundaries(target.num_hidden_layers), DraftSettings()))
    prompts = bench_prompts("test", target, None if given.per_kind else given.prompts, given.tokens)
    if given.per_kind:
        prompts = [prompt for prompt in prompts if int(prompt.id.rpartition("-")[2]) <= given.per_kind]
    results = {}
    for name in given.ways.split(","):
        drafting = WAYS[name]
        engine = Engine(target, draft, drafting=drafting, int8=int8, draft_int8=int8, announce=False)
        pairs: list[Pair] = []
        for steps in (0, engine.num_steps):  # what a first text pays alone is no part of any pair
            decode(engine, prompts[0], given.tokens, steps)
        with Progress(name, len(prompts), "prompts") as bar:
            for index, prompt in enumerate(prompts):
                turns = (0, engine.num_steps) if index % 2 else (engine.num_steps, 0)
                runs = {steps: decode(engine, prompt, given.tokens, steps) for steps in turns}
                (plain, plain_cpu), (fast, fast_cpu) = runs[0], runs[engine.num_steps]
                pairs.append(Pair(plain, fast, plain_cpu, fast_cpu))
                bar.advance(1)
        kinds, prices = by_kind(prompts, pairs), Prices.of(pairs)
        results[name] = figures(pairs, engine) | {
            "cpu_by_kind": {kind: cpu_speedup(some) for kind, some in kinds.items()},
            "priced_by_kind": {kind: prices.speedup(some) for kind, some in kinds.items()},
        }
        engine.close()
        say(f"{name}: {json.dumps(results[name])}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    told = {"ways": results, "precision": given.precision, "draft": str(given.draft), "prompts": len(prompts)}
    given.out.write_text(json.dumps({**told, "machine": machine(), "versions": versions()}, indent=1))
    say(f"wrote {given.out}")


def decode(engine: Engine, prompt: BenchPrompt, tokens: int, num_steps: int) -> tuple[Generation, list[float]]:
    """A text, and the processor seconds of each of its rounds."""
    text, cpu = engine.begin(prompt.ids, tokens, num_steps), []
    while text.finish is None:
        since = time.process_time()
        engine.round(text)
        cpu.append(time.process_time() - since)
    return text.generation(), cpu


def by_kind(prompts: list[BenchPrompt], pairs: list[Pair]) -> dict[str, list[Pair]]:
    kinds: dict[str, list[Pair]] = {}
    for prompt, pair in zip(prompts, pairs, strict=True):
        kinds.setdefault(prompt.id.removeprefix("test-").rpartition("-")[0], []).append(pair)
    return kinds


def cpu_speedup(pairs: list[Pair]) -> float:
    """Plain over drafted processor seconds of all of them together."""
    return round(sum(sum(pair.plain_cpu) for pair in pairs) / sum(sum(pair.fast_cpu) for pair in pairs), 3)


@dataclass(frozen=True)
class Prices:
    """Mean processor seconds of a plain text's round, and of a drafted text's by its depth."""

    plain: float
    fast: dict[int, float]

    @staticmethod
    def of(pairs: list[Pair]) -> "Prices":
        costs: dict[int, list[float]] = {}
        for pair in pairs:
            for depth, cost in zip(pair.fast.depths, pair.fast_cpu, strict=True):
                costs.setdefault(depth, []).append(cost)
        plain = mean(cost for pair in pairs for cost in pair.plain_cpu)
        return Prices(plain, {depth: mean(some) for depth, some in costs.items()})

    def speedup(self, pairs: list[Pair]) -> float:
        """Plain over drafted rounds at these prices: how a kind fares where every round costs what it does in all."""
        plain = self.plain * sum(len(pair.plain_cpu) for pair in pairs)
        return round(plain / sum(self.fast[depth] for pair in pairs for depth in pair.fast.depths), 3)


def figures(pairs: list[Pair], engine: Engine) -> dict[str, object]:
    """Acceptance, and decode seconds per token, plain over drafted: the median prompt and the worst."""
    timed = [pair for pair in pairs if len(pair.plain.ids) > 1 and len(pair.fast.ids) > 1]
    rounds = [n for pair in timed for n in pair.fast.rounds]
    depths = [n for pair in timed for n in pair.fast.depths]
    drafted = [len(pair.fast.depths) - pair.fast.depths.count(0) for pair in timed]
    ratios = [
        pair.plain.seconds_decode / (len(pair.plain.ids) - 1) / (pair.fast.seconds_decode / (len(pair.fast.ids) - 1))
        for pair in timed
    ]
    return {
        "speedup": round(median(ratios), 3),
        "worst_prompt": round(min(ratios), 3),
        "cpu_speedup": cpu_speedup(timed),
        "drafted_per_text": {str(n): drafted.count(n) for n in sorted(set(drafted))},
        "accept_length": round(accept_length(rounds), 3),
        "survival": survival(rounds, engine.num_steps),
        "mean_depth": round(sum(depths) / len(depths), 2),
        "plain_rounds": round(depths.count(0) / len(depths), 3),
        "same_texts": all(pair.plain.ids == pair.fast.ids for pair in timed),
        "round_costs": None if engine.costs is None else asdict(engine.costs),
    }


if __name__ == "__main__":
    main()
