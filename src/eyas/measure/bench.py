"""`eyas bench`: plain against speculative decoding by the same engine, paired.

The baseline is the faster of the engine's two plain paths: with the row bucket that makes speculation lossless, and
with single rows. Every prompt is decoded both ways, one after the other, the order alternating; a warm-up is left out.
Equality of texts is measured in float32 by the bucketed path, whatever precision the speed is measured in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.engine.costs import StepCosts, measure_costs
from eyas.engine.generate import Engine, Generation
from eyas.errors import InputError
from eyas.measure import stats
from eyas.measure.prompts import BenchPrompt, bench_prompts, conversations, spread
from eyas.measure.stats import Depth, Timing
from eyas.models.checkpoint import look_at
from eyas.models.draft import Draft
from eyas.models.fitting import load_fitting
from eyas.models.target import DTYPES, Target, load_target
from eyas.progress import Progress, say
from eyas.recipe import BenchSettings, TargetSettings
from eyas.run import machine, versions
from eyas.shipped import default_draft

JSON = dict[str, Any]
Loaded = tuple[Target, Draft | None]
DEEPEST = 4
WARM_UP = 2
PILOT_PROMPTS, PILOT_TOKENS = 20, 32


@dataclass(frozen=True)
class Candidate:
    """A precision that could be benched, what rounds cost in it, and the depth to run."""

    target: Target
    draft: Draft | None
    costs: StepCosts | None
    depth: Depth | None
    num_steps: int

    @property
    def seconds_per_token(self) -> float:
        return self.depth.seconds_per_token if self.depth else 0.0


@dataclass
class Ways:
    """Generations of every prompt, both ways, in the order of the prompts (repeats one after the other)."""

    plain: list[Generation]
    fast: list[Generation]


def bench(
    target: TargetSettings, draft: Path | None, settings: BenchSettings, survival: Sequence[float] | None = None
) -> JSON:
    """Bench the draft in folder `draft`; None benches n-gram drafting alone. `survival` (evaluate's) serves the choice
    of a depth where settings name none.

    Returns `baseline`, `speculative`, `speedup`, `identical_outputs`, `divergence`, and the conditions. Raises
    InputError for prompts, targets or drafts that cannot be used, and where there is nothing to draft with.
    """
    refuse_early(target.name, draft, settings)
    load = _loader(target, draft)
    exact = load("float32")
    prompts = bench_prompts(settings.prompts, exact[0], settings.limit, settings.max_new_tokens)
    chosen = choose(load, exact, settings, survival, prompts)
    drafting = settings.drafting.model_copy(update={"num_steps": chosen.num_steps})
    int8, draft_int8 = rounded(settings)
    engine = Engine(
        chosen.target,
        chosen.draft,
        drafting=drafting,
        draft_dtype=DTYPES.get(settings.draft_precision),
        int8=int8,
        draft_int8=draft_int8,
    )
    padded = warm_up(engine, prompts, settings)
    ways = decode_both(engine, prompts, settings, chosen.num_steps, padded)
    facts, round_costs = engine.facts, engine.costs
    known: dict[tuple[str, int], tuple[int, ...]] = {}
    equal_on = [] if settings.simulate else prompts[: settings.equality_limit]
    if facts.precision == "float32":
        known = texts(ways, prompts, settings.repeats, chosen.num_steps, padded)
        if padded and equal_on:
            equal_on = prompts
    else:
        engine.close()
        engine = Engine(*exact, drafting=drafting, announce=False, costs=round_costs)
    identical = _identical(engine, equal_on, settings, chosen.num_steps, known)
    engine.close()
    return {
        **figures(ways, chosen.num_steps, settings.repeats),
        "identical_outputs": identical,
        "identical_prompts": len(equal_on),
        "valid_outputs": not settings.simulate,
        "num_steps": chosen.num_steps,
        "drafting": drafting.model_dump(mode="json"),
        "sampling": settings.sampling.model_dump(mode="json"),
        "draft_precision": settings.draft_precision,
        "round_costs": asdict(round_costs) if round_costs else None,
        "prompts": settings.prompts,
        "precision": facts.precision,
        "baseline_path": "bucket" if padded else "single rows",
        "engine": asdict(facts),
        "predicted": asdict(chosen.depth) if chosen.depth else None,
        "costs": asdict(chosen.costs) if chosen.costs else None,
        "max_new_tokens": settings.max_new_tokens,
        "threads": torch.get_num_threads(),
        "machine": machine(),
        "versions": versions(),
    }


def refuse_early(target: str, draft: Path | None, settings: BenchSettings) -> None:
    """Raise InputError where `bench` would for its flags, its prompts' source or the draft's files: asked before
    anything is loaded."""
    if draft is None and not settings.ngram:
        raise nothing_drafts(target)
    if draft is not None:
        look_at(draft, settings.num_steps)
    conversations(settings.prompts)


def nothing_drafts(target: str) -> InputError:
    shipped, _ = default_draft(target)
    others = "--draft DRAFT" if shipped is None else "without --plain, by the draft that comes with Eyas"
    return InputError(
        wanted="a draft, or n-gram drafting",
        got="neither: plain decoding would be compared with itself",
        where="bench",
        next=f"--ngram 3; or {others}",
    )


def choose(
    load: Callable[[str], Loaded],
    exact: Loaded,
    settings: BenchSettings,
    survival: Sequence[float] | None,
    prompts: Sequence[BenchPrompt],
) -> Candidate:
    """Precision and depth: those the settings name, else those predicted to give the most tokens a second.

    What is predicted is a chain; trees, n-grams and an adaptive depth run at most DEEPEST levels where none is named.
    """
    names = ("float32", "bfloat16") if settings.precision == "auto" else (settings.precision,)
    shaped = settings.topk > 1 or settings.adaptive or settings.ngram > 0
    num_steps = settings.num_steps or (DEEPEST if shaped else None)
    if exact[1] is None:
        names = names[:1]  # without a draft's rounds to weigh, `auto` is the precision whose texts are compared
    if num_steps is not None and len(names) == 1:
        loaded = exact if names[0] == "float32" else load(names[0])
        return Candidate(*loaded, None, None, num_steps)
    survival = survival or settings.simulate
    survival = list(survival) if survival is not None else pilot(exact, prompts, settings)
    if num_steps is not None:
        survival += [0.0] * (num_steps - len(survival))
    depths = [num_steps] if num_steps else list(range(1, min(DEEPEST, len(survival)) + 1))
    return min((candidate(name, load, exact, depths, survival) for name in names), key=lambda c: c.seconds_per_token)


def candidate(
    name: str, load: Callable[[str], Loaded], exact: Loaded, depths: Sequence[int], survival: Sequence[float]
) -> Candidate:
    """Cost and best depth of one precision."""
    target, draft = exact if name == "float32" else load(name)
    assert draft is not None, "rounds of a draft are weighed"
    costs = measure_costs(target, draft, depths, int8=name == "int8", draft_int8=name == "int8")
    rounds = {depth: costs.round(depth) for depth in depths}
    depth = stats.choose_num_steps(survival, costs.plain, rounds)
    say(
        f"bench: {name}: plain step {costs.plain * 1e3:.1f} ms; rounds "
        + ", ".join(f"of {depth}: {seconds * 1e3:.1f} ms" for depth, seconds in rounds.items())
        + f"; best depth {depth.num_steps}, predicted {1 / depth.seconds_per_token:.1f} tokens/s, "
        f"{depth.speedup:.2f}x"
    )
    return Candidate(target, draft, costs, depth, depth.num_steps)


def pilot(loaded: Loaded, prompts: Sequence[BenchPrompt], settings: BenchSettings) -> list[float]:
    """Survival of the deepest chain on some of the prompts, for want of the evaluator's: beginnings of many texts, for
    acceptance differs more from prompt to prompt than from round to round."""
    deepest = settings.num_steps or DEEPEST
    engine = Engine(*loaded, num_steps=deepest, announce=False)
    some, tokens = spread(prompts, min(PILOT_PROMPTS, len(prompts))), min(PILOT_TOKENS, settings.max_new_tokens)
    rounds = [n for prompt in some for n in engine.generate(prompt.ids, tokens, deepest).rounds]
    engine.close()
    return stats.survival(rounds, deepest)


def warm_up(engine: Engine, prompts: Sequence[BenchPrompt], settings: BenchSettings) -> bool:
    """Decode a little every way, untimed in the result; whether the bucketed plain path is the faster."""
    seconds = {True: float("inf"), False: float("inf")}
    tokens, sampling = min(24, settings.max_new_tokens), settings.sampling
    engine.generate(prompts[0].ids, tokens, engine.num_steps, ignore_eos=True, sampling=sampling)
    for prompt in prompts[:WARM_UP]:
        for padded in (True, False):
            run = engine.generate(prompt.ids, tokens, 0, ignore_eos=True, padded=padded, sampling=sampling)
            seconds[padded] = min(seconds[padded], run.seconds_decode)
    return seconds[True] <= seconds[False]


def decode_both(
    engine: Engine, prompts: Sequence[BenchPrompt], settings: BenchSettings, num_steps: int, padded: bool
) -> Ways:
    """Every prompt both ways, the order alternating from one to the next; simulated texts have no end of their own, and
    so plain ones are not let end either."""
    ways, limit, sampling, endless = Ways([], []), settings.max_new_tokens, settings.sampling, bool(settings.simulate)
    with Progress("bench", len(prompts) * settings.repeats, "prompts") as bar:
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(settings.repeats)):
            for fast in (False, True) if index % 2 == 0 else (True, False):
                if fast:
                    ways.fast.append(engine.generate(prompt.ids, limit, num_steps, endless, sampling=sampling))
                else:
                    ways.plain.append(engine.generate(prompt.ids, limit, 0, endless, padded, sampling))
            bar.advance(1, note=f"{rough_speedup(ways):.2f}x so far")
    return ways


def rough_speedup(ways: Ways) -> float:
    plain, fast = (stats.rates([timing(run) for run in runs]) for runs in (ways.plain, ways.fast))
    return fast["output_tok_s"] / plain["output_tok_s"] if plain["output_tok_s"] else 1.0


def figures(ways: Ways, num_steps: int, repeats: int) -> JSON:
    """`baseline`, `speculative`, `speedup` and `divergence` of all prompts."""
    plain, fast = _per_prompt(ways.plain, repeats), _per_prompt(ways.fast, repeats)
    rounds = [accepted for run in ways.fast for accepted in run.rounds]
    depths = [depth for run in ways.fast for depth in run.depths]
    parted = sum(a.ids != b.ids for a, b in zip(ways.plain, ways.fast, strict=True))
    return {
        "baseline": stats.rates(plain),
        "speculative": {
            **stats.rates(fast),
            "accept_length": round(stats.accept_length(rounds), 4),
            "survival": stats.survival(rounds, num_steps),
            "rounds": len(rounds),
            "num_steps": num_steps,
            "depths": {str(depth): depths.count(depth) for depth in sorted(set(depths))},
        },
        "speedup": stats.speedup(list(zip(plain, fast, strict=True))).as_dict(),
        "divergence": round(parted / len(ways.plain), 4),
    }


def timing(run: Generation) -> Timing:
    return Timing(len(run.ids) - 1, run.seconds_decode, run.seconds_prefill)


def _per_prompt(runs: Sequence[Generation], repeats: int) -> list[Timing]:
    """A prompt's repeats added up: prompts, not repeats, are what the bootstrap resamples."""
    timings = [timing(run) for run in runs]
    groups = [timings[start : start + repeats] for start in range(0, len(timings), repeats)]
    return [
        Timing(
            sum(t.tokens for t in group),
            sum(t.seconds for t in group),
            sum(t.seconds_prefill for t in group) / len(group),
        )
        for group in groups
    ]


def texts(
    ways: Ways, prompts: Sequence[BenchPrompt], repeats: int, num_steps: int, padded: bool
) -> dict[tuple[str, int], tuple[int, ...]]:
    """(prompt id, chain depth) to ids, of what the timed runs already decoded by the lossless paths."""
    known = {}
    for index, prompt in enumerate(prompts):
        known[prompt.id, num_steps] = ways.fast[index * repeats].ids
        if padded:
            known[prompt.id, 0] = ways.plain[index * repeats].ids
    return known


def _identical(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    settings: BenchSettings,
    num_steps: int,
    known: Mapping[tuple[str, int], tuple[int, ...]],
) -> bool | None:
    """Whether plain and speculative ids are the same on all of `prompts` in float32; None for no prompts."""
    if not prompts:
        return None
    same = True
    with Progress("equality, float32", len(prompts), "prompts") as bar:
        for prompt in prompts:
            plain, fast = (
                known.get((prompt.id, steps))
                or engine.generate(prompt.ids, settings.max_new_tokens, steps, sampling=settings.sampling).ids
                for steps in (0, num_steps)
            )
            same = same and plain == fast
            bar.advance(1)
    return same


def rounded(settings: BenchSettings) -> tuple[bool, bool]:
    """Whether target and draft are rounded to int8."""
    int8 = settings.precision == "int8"
    return int8, settings.draft_precision == "int8" or (int8 and settings.draft_precision == "target")


def _loader(target: TargetSettings, draft: Path | None) -> Callable[[str], Loaded]:
    def load(precision: str) -> Loaded:
        precision = "bfloat16" if precision == "int8" else precision
        loaded = load_target(target.name, dtype=precision, trust_remote_code=target.trust_remote_code)
        if draft is None:
            return loaded, None
        return loaded, load_fitting(draft, loaded)[0]

    return load
