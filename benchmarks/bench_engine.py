"""What the embedded engine's forwards cost on the default target, as ratios to one plain step.

    python benchmarks/bench_engine.py [--draft DRAFT] [--target T] [--precision float32] [--depths 5] [--profile]

Without --draft an untrained one of the default shape is used: costs do not depend on what it drafts.
"""

import argparse
import json
from pathlib import Path

import torch

from eyas.engine.costs import StepCosts, measure_costs
from eyas.engine.generate import Engine
from eyas.formats.taps import default_boundaries
from eyas.models.checkpoint import load_draft
from eyas.models.draft import Draft
from eyas.models.target import DEFAULT_TARGET, Target, load_target
from eyas.recipe import DraftSettings
from eyas.run import machine, versions
from eyas.training.initialise import draft_config

PROMPT = "Explain in detail how a bicycle works and why it stays upright."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="where the time of speculative rounds goes")
    args = parser.parse_args()
    for precision in args.precision:
        target = load_target(args.target, dtype=precision)
        draft = make_draft(target, args.draft)
        costs = measure_costs(target, draft, range(1, args.depths + 1))
        report = {"precision": precision, **ratios(costs), **baselines(target, draft, args.tokens)}
        print(json.dumps(report | {"machine": machine(), "versions": versions(), "threads": torch.get_num_threads()}))
        if args.profile:
            profile(target, draft, args.tokens)


def make_draft(target: Target, folder: Path | None) -> Draft:
    if folder is not None:
        return load_draft(folder, target.embedding, target.dtype)[0]
    torch.manual_seed(0)
    boundaries = default_boundaries(target.num_hidden_layers)
    return Draft(draft_config(target, boundaries, DraftSettings()))


def ratios(costs: StepCosts) -> dict[str, object]:
    """A plain step in ms; everything else in plain steps."""
    plain = costs.plain
    return {
        "plain_step_ms": round(plain * 1e3, 2),
        "verify_rows": {depth + 1: round(seconds / plain, 3) for depth, seconds in costs.verify.items()},
        "draft_chain": {depth: round(seconds / plain, 3) for depth, seconds in costs.draft.items()},
        "break_even_accept_length": {depth: round(costs.round(depth) / plain, 3) for depth in costs.verify},
    }


def baselines(target: Target, draft: Draft, tokens: int) -> dict[str, object]:
    """Padded against unpadded plain decoding, alternating, for chains of 1 and 3."""
    ids = target.tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    found: dict[str, object] = {}
    for num_steps in (1, 3):
        engine = Engine(target, draft, num_steps=num_steps)
        seconds = {True: float("inf"), False: float("inf")}
        for _ in range(3):
            for padded in (True, False):
                run = engine.generate(ids["input_ids"], tokens, 0, ignore_eos=True, padded=padded)
                seconds[padded] = min(seconds[padded], run.seconds_decode)
        found[f"padded_over_unpadded_num_steps_{num_steps}"] = round(seconds[True] / seconds[False], 3)
        engine.close()
    return found


def profile(target: Target, draft: Draft, tokens: int) -> None:
    """torch's own table of one speculative generation, by operator."""
    engine = Engine(target, draft, num_steps=1)
    ids = list(range(100, 140))
    engine.generate(ids, tokens, 1, ignore_eos=True)
    with torch.profiler.profile() as profiler:
        engine.generate(ids, tokens, 1, ignore_eos=True)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
    engine.close()


if __name__ == "__main__":
    main()
