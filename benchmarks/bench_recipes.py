"""Accept length at equal data and steps: Eyas' defaults beside speculators 0.9.0's EAGLE-3 recipe, run by its own code.

    python benchmarks/bench_recipes.py --captures RUN/captures [--heldout OTHER/captures] [--tokens 40000 100000]
    python benchmarks/bench_recipes.py --captures RUN/captures --table                          (make bench-recipes)

For each budget and seed both train on the same stored states: the same samples, packed alike, in the same order, one
optimiser step each, over as large a draft vocabulary; the last step is the draft. So a budget below one epoch is, for
each seed, another part of the captures. What is measured is the walk on held-out answers, by one code for both.
speculators trains in its own environment (recipe_peer.py: its model, loss, optimisers and schedule, at the values that
its command line has when nothing is said). `--set` changes Eyas' side alone, but for `train.batch_tokens` and
`draft.vocab_size`, which are both's; speculators' is float32 whatever `train.precision` says.

Each run is a row of `bench/out/recipes.jsonl`; a run that has its row, there or in `benchmarks/recipes.jsonl`, is not
run again: speculators' whatever `--set` says of ours alone, ours while its settings are what a default still means.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ablations import Judge, Row, append, base_of, interval, one_run, rows_of, trained_by
from bench_training import Worker, peers_environment
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.data.shards import CaptureReader, Sample
from eyas.models.checkpoint import make_info, save_draft
from eyas.models.draft import make_draft
from eyas.models.target import Target, load_target
from eyas.progress import Progress, say
from eyas.recipe import Recipe, recipe_of
from eyas.run import machine, versions
from eyas.stage import flat
from eyas.training.batches import planned
from eyas.training.initialise import count_tokens, draft_config, gain

HERE = Path(__file__).parent
OUT = Path("bench/out")
KEPT = HERE / "recipes.jsonl"
"""Rows in git: those of the table in docs/training.md."""
BOTH = ("target.name", "train.evaluate_every", "train.precision", "train.batch_tokens", "draft.vocab_size")
"""Settings that are speculators' too."""
OURS, PEER = RECIPES = ("eyas", "speculators")


def peers_settings(recipe: Recipe) -> tuple[str, ...]:
    """What speculators' runs depend on, said or a default; their products are float32's."""
    settings = flat(recipe.model_dump(mode="json")) | {"train.precision": "float32"}
    return tuple(f"{name}={settings[name]}" for name in BOTH)


def left(rows: list[Row], budgets: list[int], seeds: int) -> Iterator[tuple[int, int, str]]:
    """What is still to run, in pairs."""
    done = {(row["budget"], row["seed"], row["name"]) for row in rows}
    for budget in budgets:
        for seed in range(seeds):
            yield from ((budget, seed, name) for name in RECIPES if (budget, seed, name) not in done)


def table(rows: list[Row]) -> str:
    """Markdown, one line a budget; the difference is paired by seed."""
    lines = ["| tokens | steps | seeds | Eyas | speculators | difference |", "|---|---|---|---|---|---|"]
    for budget in sorted({row["budget"] for row in rows}):
        by = {(row["name"], row["seed"]): row for row in rows if row["budget"] == budget}
        seeds = [seed for name, seed in by if name == OURS and (PEER, seed) in by]
        if not seeds:
            continue
        lengths = [[by[name, seed]["accept_length"] for seed in seeds] for name in RECIPES]
        over = interval([ours - theirs for ours, theirs in zip(*lengths, strict=True)])
        steps = sorted({by[OURS, seed]["steps"] for seed in seeds})
        shown = " | ".join(map(interval, lengths))
        lines.append(f"| {budget} | {steps[0]} to {steps[-1]} | {len(seeds)} | {shown} | {over} |")
    return "\n".join(lines)


def documents(samples: list[Sample]) -> dict[str, Tensor]:
    """A batch as recipe_peer.py reads it. Its masks are the tokens' own, as ours."""
    tensors = {}
    for number, sample in enumerate(samples):
        tensors |= {
            f"{number}.ids": sample.ids_T.long(),
            f"{number}.taps": sample.taps_TA,
            f"{number}.last_hidden": sample.last_hidden_TH,
            f"{number}.mask.speculators": sample.loss_mask_T.long(),
        }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def speculators_run(recipe: Recipe, captures: Path, folder: Path, seed: int, python: Path, threads: int) -> Row:
    """Train by speculators what `train` would train, into `folder`, and what it cost."""
    target, reader = load_target(recipe.target.name), CaptureReader(captures)
    plan = planned(reader, recipe.train.model_copy(update={"seed": seed}))
    with tempfile.TemporaryDirectory() as place:
        start, batch, saved = (Path(place) / name for name in ("start", "batch.safetensors", "draft.safetensors"))
        write_start(start, recipe, target, reader)
        command: list[str | Path] = [python, HERE / "recipe_peer.py", start, str(seed), str(len(plan))]
        threading = {"OMP_NUM_THREADS": str(threads), "EYAS_BENCH_THREADS": str(threads)}
        worker = Worker(command, peers_environment() | threading)
        began, tokens, losses = time.perf_counter(), 0, []
        with Progress(PEER, len(plan), "steps") as bar:
            for step in plan:
                indices = [index for batches in step for index in batches]
                save_file(documents(reader.read_all(indices)), batch)
                losses.append(worker.ask(str(batch))["loss"])
                tokens += sum(reader.samples[index].length for index in indices)
                bar.advance(1)
        seconds = time.perf_counter() - began
        worker.ask(f"save {saved}")
        worker.stop()
        shape = recipe.draft.model_copy(update=worker.first["draft"])
        draft = make_draft(draft_config(target, reader.boundaries, shape))
        missing, unexpected = draft.load_state_dict(load_file(saved), strict=False)
        assert not unexpected and missing == ["embed_tokens.weight"], (missing, unexpected)
    info = make_info(
        draft,
        target.identity,
        tokenizer_hash=target.tokenizer_hash,
        template_hash=target.template_hash,
        ttt_length=worker.first["ttt_steps"],
        last_hidden_norm=reader.last_hidden_norm,
    )
    save_draft(folder, draft, info)
    return {"seconds": seconds, "tokens": tokens, "steps": len(plan), "losses": losses, "settings": worker.first}


def write_start(start: Path, recipe: Recipe, target: Target, reader: CaptureReader) -> None:
    """The draft's sizes, and what it takes from the target and the answers."""
    config = draft_config(target, reader.boundaries, recipe.draft)
    counts_V = count_tokens(reader, reader.of_split("train"), "assistant", target.vocab_size)
    embedding = target.embedding.detach()
    tensors = {
        "embedding": embedding,
        "norm": gain(target.final_norm, embedding[0]),
        "head": target.head.weight.detach(),
        "counts": counts_V,
    }
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, start.with_suffix(".safetensors")
    )
    start.with_suffix(".json").write_text(json.dumps(config.model_dump(mode="json")))


def run(name: str, recipe: Recipe, judge: Judge, folder: Path, seed: int, base: str, options: Any) -> Row:
    if name == OURS:
        return one_run(recipe, options.captures, judge, folder, name, seed, base)
    facts = speculators_run(recipe, options.captures, folder, seed, options.peers_python, options.threads)
    row = {"base": base, "name": name, "seed": seed, **judge.measure(folder)}
    return row | facts | {"machine": machine(), "versions": versions()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captures", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, help="captures whose held-out answers are measured; --captures' own")
    parser.add_argument("--target", default=Recipe().target.name)
    parser.add_argument("--tokens", type=int, nargs="+", default=[40_000, 100_000])
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6))
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--threads", type=int, default=1, help="of speculators; ours has torch's")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--peers-python", type=Path, default=os.environ.get("EYAS_PEERS_PYTHON", ".venv-peers/bin/python")
    )
    parser.add_argument("--table", action="store_true", help="show what is there and run nothing")
    options = parser.parse_args(argv)
    shared = (f"target.name={options.target}", "train.evaluate_every=0", "train.precision=float32", *options.sets)
    theirs = peers_settings(recipe_of(shared))
    bases = {
        name: base_of(sets, options.captures, options.heldout)
        for name, sets in zip(RECIPES, (shared, theirs), strict=True)
    }
    path = options.out / "recipes.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = CaptureReader(options.captures).samples
    total = sum(sample.length for sample in entries if sample.split == "train")

    def recipe_for(budget: int) -> Recipe:
        return recipe_of((*shared, f"train.epochs={budget / total:.6f}"))

    known = [
        row
        for name, base in bases.items()
        for file in (KEPT, path)
        for row in rows_of(file, base)
        if row["name"] == name
    ]
    rows = [row for row in known if row["name"] == PEER or trained_by(row, recipe_for(row["budget"]))]
    judge = None
    while not options.table and (todo := next(left(rows, options.tokens, options.seeds), None)) is not None:
        budget, seed, name = todo
        say(f"recipes: {budget} tokens, seed {seed}, {name}")
        recipe: Any = recipe_for(budget)
        folder = options.out / "recipes" / f"{bases[name]}-{name}-{budget}-{seed}"
        judge = judge or Judge(options.heldout or options.captures, recipe)
        row = run(name, recipe, judge, folder, seed, bases[name], options) | {"budget": budget}
        append(path, row)
        rows.append(row)
        shutil.rmtree(folder)
    print(table(rows))


if __name__ == "__main__":
    main()
