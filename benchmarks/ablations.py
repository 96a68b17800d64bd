"""What to train: one change at a time against the default, on one stored set of captures.

    python benchmarks/ablations.py --captures RUN/captures [--heldout OTHER/captures] [--hours 6] [--set train.epochs=3]
    python benchmarks/ablations.py --captures RUN/captures --table

First every change with one seed; then the best three and the default with two seeds more. Each run is a row of
`bench/out/ablations.jsonl`: what was changed, seed, held-out accept length (the walk, chains of `evaluate.steps`), and
what it cost. A run that has its row, there or among those kept in `benchmarks/ablations.jsonl`, is not run again and a
run that was cut resumes; no run starts that would, by what the last ones took, bring those of this set beyond `--hours`
in all. The same command once more, beside the first, shares the runs with it: one process a core, of one thread each.
`--set` lays the same base under all of them; rows of another base or set are others (answers and how they were
captured make a set, on whatever machine), and so are rows of settings that their change, or a default, no longer means:
those are neither shown nor counted, and their runs are made again.

Figures are shown as the mean over seeds with a 95 % interval (Student's t over seeds), and as the paired difference to
the default on the same seeds: with one seed there is no interval and nothing is proven. Each run's best step is chosen
on some of the captures' held-out answers; without --heldout it is then measured on those too, so all figures are a
little high, all in the same way.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from eyas.data.shards import CaptureReader
from eyas.errors import InputError
from eyas.lock import lock_folder
from eyas.models.checkpoint import load_draft
from eyas.models.target import load_target
from eyas.models.vocab import target_ids
from eyas.progress import say
from eyas.recipe import CaptureSettings, Recipe, recipe_of, recorded_training
from eyas.run import JSON, hash_json, machine, read_manifest, versions
from eyas.stage import flat
from eyas.training.evaluate import Tally, Truth, add_sample, truth_of
from eyas.training.inputs import check_draft
from eyas.training.loop import train
from eyas.training.teacher import Teacher

OUT = Path("bench/out")
KEPT = Path(__file__).with_suffix(".jsonl")
"""Rows in git: those of the table in docs/training.md, of torch's Muon iteration (before decision 93)."""
DEFAULT = "default"
BEFORE = ("train.head=trained", "train.step_decay=0.8")
"""What the default was when most rows were made."""
H_FED_BACK = (*BEFORE, "draft.norm_output=false")
HALF = (*H_FED_BACK, "train.batch_tokens=256")
ADAMW = (*HALF, "train.optimiser=adamw")
CHANGES: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    "head trained": ("train.head=trained",),
    "steps weigh 0.8": ("train.step_decay=0.8",),
    "reverse KL": ("train.loss=reverse_kl",),
    "total variation": ("train.loss=total_variation",),
    "LK alpha": ("train.loss=lk_alpha",),
    "LK lambda": ("train.loss=lk_lambda",),
    "LK lambda, decay 3": ("train.loss=lk_lambda", "train.lk_decay=3.0"),
    "accept length": ("train.loss=accept_length",),
    "rows that own drafts reach": ("train.on_policy=true",),
    "all rows below the sum": ("train.denominator=all",),
    "half the batch": ("train.batch_tokens=256",),
    "twice the batch": ("train.batch_tokens=1024",),
    "half the rate": ("train.learning_rate=5e-4",),
    "twice the rate": ("train.learning_rate=2e-3",),
    "down to nothing": ("train.final_learning_rate=0",),
    "down to three tenths": ("train.final_learning_rate=0.3",),
    "AdamW": ("train.optimiser=adamw",),
    "h fed back": ("draft.norm_output=false",),
    "prompts too": ("train.loss_on=all",),
    "weights decay": ("train.weight_decay=0.1",),
    "from noise": ("train.initialise=random",),
    "from the target's head": ("train.initialise=target",),
    "TTT 5": ("train.ttt_length=5",),
    "1.45 epochs": ("train.epochs=1.45",),
    "no norms of the taps": ("draft.fc_norm=false",),
    "residual after the norm": ("draft.norm_before_residual=true",),
    "Qwen3 block": ("draft.block=qwen3",),
    "P-EAGLE": ("draft.method=peagle", "draft.norm_output=false"),
    "two layers": ("draft.num_hidden_layers=2",),
    "half the vocabulary": ("draft.vocab_size=4096",),
    "twice the vocabulary": ("draft.vocab_size=16384",),
    "head trained, prompts too": ("train.head=trained", "train.loss_on=all"),
    "before": BEFORE,
    "before, TTT 5": (*BEFORE, "train.ttt_length=5"),
    "before, residual after the norm": (*BEFORE, "draft.norm_before_residual=true"),
    "before, h fed back": H_FED_BACK,
    "before, h fed back, steps weigh the same": (*H_FED_BACK, "train.step_decay=1.0"),
    "before, h fed back, half the batch": HALF,
    "before, h fed back, half the batch, half the rate": (*HALF, "train.learning_rate=5e-4"),
    "before, h fed back, half the batch, three times the rate": (*HALF, "train.learning_rate=3e-3"),
    "before, h fed back, half the batch, AdamW": ADAMW,
    "before, h fed back, half the batch, AdamW, half the rate": (*ADAMW, "train.learning_rate=5e-4"),
    "before, h fed back, half the batch, AdamW, a quarter of the rate": (*ADAMW, "train.learning_rate=2.5e-4"),
    "before, h fed back, half the batch, AdamW, LK alpha": (*ADAMW, "train.loss=lk_alpha"),
}
POLL_S = 20
"""Seconds between looks at what other processes are at, where only that is left."""
LAST = 3
"""Runs by which the time of the next is foretold."""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % points of Student's t by number of seeds."""
Row = dict[str, Any]


def rows_of(path: Path, base: str) -> list[Row]:
    """The rows of this base and these captures; a line cut by a kill is none."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}\n")]
    return [row for row in rows if row["base"] == base]


def base_of(shared: tuple[str, ...], captures: Path, heldout: Path | None) -> str:
    """What all runs of a set share."""
    return hash_json([shared, *(contents(folder) for folder in (captures, heldout) if folder)])[:16]


def contents(folder: Path) -> JSON:
    """What a folder was made of and how, without what differs from machine to machine: clocks, a state's last bits."""
    manifest = read_manifest(folder)
    made: JSON = {"settings": manifest.settings, "weights": manifest.facts["target"]["weights_hash"]}
    if manifest.stage == "responses":
        return made | {"files": manifest.files}
    samples = [[entry.id, entry.split, entry.length, entry.prompt_tokens] for entry in CaptureReader(folder).samples]
    return made | {"computed_in": manifest.facts.get("computed_in"), "samples": samples}


def settings_of(recipe: Recipe, seed: int, online: bool) -> JSON:
    """What the manifest of such a run says of its settings."""
    settings = recipe.train.model_copy(update={"seed": seed, "online": online})
    return recorded_training(settings, recipe.draft, recipe.target, CaptureSettings() if online else None)


def valid(row: Row, shared: tuple[str, ...], online: bool) -> bool:
    """Whether a row is of the settings that its change means today."""
    if row["name"] not in CHANGES:
        return False
    return trained_by(row, recipe_of((*shared, *CHANGES[row["name"]])), online)


def trained_by(row: Row, recipe: Recipe, online: bool = False) -> bool:
    """Whether a row is of these settings, measured in as long chains."""
    ours, theirs = flat(settings_of(recipe, row["seed"], online)), flat(row["settings"])
    same = all(ours.get(key) == theirs.get(key) for key in ours.keys() | theirs.keys())
    return same and len(row["survival"]) == recipe.evaluate.steps


def cost(row: Row) -> float:
    """Seconds, the judge's too where the row has them."""
    return row["seconds"] + row.get("judge_seconds", 0.0)


def needed(rows: list[Row]) -> float:
    """Seconds that the next run takes, by the last ones; 0 before the first."""
    return mean(map(cost, rows[-LAST:])) if rows else 0.0


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write("\n" * torn(path) + json.dumps(row) + "\n")


def torn(path: Path) -> bool:
    """Whether the last line was cut by a kill."""
    return path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0


def left(rows: list[Row], names: Iterable[str], finalists: int, seeds: int) -> Iterator[tuple[str, int]]:
    """What is still to run: every change with seed 0, then the finalists' other seeds."""
    names, done = list(names), {(row["name"], row["seed"]) for row in rows}
    screen = [(name, 0) for name in names if (name, 0) not in done]
    if screen:
        yield from screen
        return
    first = {row["name"]: row["accept_length"] for row in rows if row["seed"] == 0}
    ranked = sorted((name for name in names if name != DEFAULT), key=lambda name: -first[name])
    for seed in range(1, seeds):
        yield from ((name, seed) for name in [DEFAULT, *ranked[:finalists]] if (name, seed) not in done)


@contextmanager
def claim(todo: Iterable[tuple[str, int]], folder: Callable[[str, int], Path]) -> Iterator[tuple[str, int] | None]:
    """The first of these runs that no other process is at, locked; None where there is none."""
    for name, seed in todo:
        try:
            at = folder(name, seed)
            lock = lock_folder(at.with_name(f"{at.name}.claim"))  # the run's own is the trainer's
        except InputError:  # another process's
            continue
        try:
            yield name, seed
        finally:
            if lock is not None:
                lock.release()
        return
    yield None


def one_run(recipe: Recipe, captures: Path, judge: "Judge", folder: Path, name: str, seed: int, base: str) -> Row:
    settings = recipe.train.model_copy(update={"seed": seed})
    manifest = train(captures, folder, settings, recipe.draft, recipe.target)
    started = time.monotonic()
    measured = judge.measure(folder)
    return {
        "base": base,
        "name": name,
        "seed": seed,
        **measured,
        "seconds": manifest.seconds,
        "judge_seconds": round(time.monotonic() - started, 3),
        "tokens": manifest.facts["tokens"],
        "steps": manifest.facts["steps"],
        "best": manifest.facts["draft"],
        "settings": manifest.settings,
        "machine": machine(),
        "versions": versions(),
    }


class Judge:
    """`eyas evaluate` for many drafts: the target is loaded, and asked about each held-out answer, once."""

    def __init__(self, heldout: Path, recipe: Recipe) -> None:
        self.folder, self.reader, self.steps = heldout, CaptureReader(heldout), recipe.evaluate.steps
        self.target = load_target(recipe.target.name)
        self.truths: dict[int, Truth] = {}

    def measure(self, folder: Path) -> Row:
        draft, info = load_draft(folder, self.target.embedding, torch.float32)
        check_draft(info, self.reader.boundaries, self.reader.manifest.facts, self.folder)
        teacher, tally = Teacher(self.target, target_ids(draft.d2t), self.reader.last_hidden_norm), Tally(self.steps)
        for number in self.reader.of_split("heldout"):
            sample = self.reader.read(number)
            if number not in self.truths:
                self.truths[number] = truth_of(sample, teacher)
            add_sample(tally, draft, sample, teacher, self.truths[number])
        return figures(tally.result(self.reader.greedy))


def figures(found: dict[str, Any]) -> Row:
    return {
        "accept_length": found["accept_length_walk"],
        "accept_length_rows": found["accept_length"],
        "survival": found["survival"],
        "accuracy": found["accuracy"],
    }


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.4f}" if values else ""
    half = STUDENT[len(values)] * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.4f} ± {half:.4f}"


def table(rows: list[Row]) -> str:
    """Markdown, the best first."""
    by_name: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row["seed"]] = row
    default = by_name.get(DEFAULT, {})
    lines = ["| change | seeds | accept length | over the default | seconds |", "|---|---|---|---|---|"]
    for name, runs in sorted(by_name.items(), key=lambda item: -mean(r["accept_length"] for r in item[1].values())):
        lengths = [row["accept_length"] for row in runs.values()]
        shared = [runs[seed]["accept_length"] - default[seed]["accept_length"] for seed in runs if seed in default]
        over = "" if name == DEFAULT else interval(shared)
        seconds = mean(row["seconds"] for row in runs.values())
        lines.append(f"| {name} | {len(runs)} | {interval(lengths)} | {over} | {seconds:.0f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captures", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, help="captures whose held-out answers are measured; --captures' own")
    parser.add_argument("--target", default=Recipe().target.name)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--only", nargs="+", default=list(CHANGES), choices=list(CHANGES))
    parser.add_argument("--finalists", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6))
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--table", action="store_true", help="show what is there and run nothing")
    options = parser.parse_args(argv)
    shared = (f"target.name={options.target}", *options.sets)
    base = base_of(shared, options.captures, options.heldout)
    path = options.out / "ablations.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys([DEFAULT, *options.only]))
    online = read_manifest(options.captures).stage == "responses"

    def folder_of(name: str, seed: int) -> Path:
        return options.out / "ablations" / f"{base}-{name.replace(' ', '-').replace(',', '')}-{seed}"

    def known() -> list[Row]:
        """Read anew for each run: another process may have written some."""
        found = {(row["name"], row["seed"]): row for row in [*rows_of(KEPT, base), *rows_of(path, base)]}
        return [row for row in found.values() if valid(row, shared, online)]

    rows, judge = known(), None
    while not options.table and (todo := list(left(rows, names, options.finalists, options.seeds))):
        spent, more = sum(map(cost, rows)) / 3600, needed(rows) / 3600
        if spent + more > options.hours:
            say(f"ablations: {spent:.1f} h of {options.hours:.1f} spent, a run takes {more:.1f}; --hours more goes on")
            break
        with claim(todo, folder_of) as mine:
            if mine is None:
                time.sleep(POLL_S)
            elif mine not in {(row["name"], row["seed"]) for row in known()}:  # else finished in between
                name, seed = mine
                say(f"ablations: {name}, seed {seed}")
                recipe, folder = recipe_of((*shared, *CHANGES[name])), folder_of(name, seed)
                judge = judge or Judge(options.heldout or options.captures, recipe)
                append(path, one_run(recipe, options.captures, judge, folder, name, seed, base))
                shutil.rmtree(folder)
        rows = known()
    print(table(rows))


if __name__ == "__main__":
    main()
