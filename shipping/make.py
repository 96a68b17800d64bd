"""The shipped draft, from the bank to the package: `make shipped`. Hours on two cores; the same command resumes.

    python shipping/make.py [--until answers] [--kept] [--out runs/shipped] [--set train.epochs=6 ...]

    own        the target writes questions           shipping/own.jsonl.xz, kept in git (none with --kept, or ask = 0)
    prompts    bank, own questions, held-out topics  runs/shipped/prompts
    answers    begun from shipping/answers.xz        runs/shipped/responses      then packed into that file again
    test       answers and captures of the test set  runs/shipped/test-*
    captures   held-out topics (all, where stored)   runs/shipped/captures
    train      online, or on stored states           runs/shipped/draft
    bench      of the rounded draft, by [bench]      runs/shipped/bench
    pack       measured, with its card               src/eyas/shipped/eagle3

With --kept only those train prompts are asked that shipping/answers.xz has an answer to: no hours of decoding.
What is done is skipped; what was begun goes on. `shipping/prompts.toml` says what is asked, `shipping/shipped.toml` how
it is answered and learned.
"""

import argparse
import json
import lzma
import sys
import tomllib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from eyas.data.bank import generate, load_test_set
from eyas.data.captures import capture
from eyas.data.own_prompts import harvest, read_turns, write_turns
from eyas.data.packed import lay, pack, read_packed
from eyas.data.prompts import PROMPTS, Row, bank_row, prompt_row
from eyas.data.responses import respond
from eyas.errors import EyasError
from eyas.failures import report
from eyas.measure.bench import bench
from eyas.models.target import load_target
from eyas.pipeline.run import Stages
from eyas.progress import say
from eyas.recipe import Recipe, load_recipe, validate
from eyas.run import JSON, Manifest, hash_file, is_complete, write_atomic
from eyas.settings import Section
from eyas.shipped import shipped_root
from eyas.stage import Stage, completed
from eyas.training.loop import train
from pack_draft import pack_draft, rounded

HERE = Path(__file__).parent
ANSWERS = HERE / "answers.xz"
STEPS = ("own", "prompts", "answers", "test", "captures", "train", "bench", "pack")
"""In their order; each is a property of `Making` and makes what it needs first."""


class Asked(Section):
    """shipping/prompts.toml."""

    seeds: tuple[int, ...]
    """The bank's; a prompt that two of them draw is asked once."""
    each: int
    """Train prompts of each seed."""
    heldout: int
    """Prompts on held-out topics, only evaluated."""
    heldout_seed: int
    ask: int
    """User turns that the target writes itself; one in nine was dropped (docs/lab.md)."""
    ask_seed: int


class Making:
    """One run: where it lies, by which recipe. Each step is made, or found done, once."""

    def __init__(self, recipe: Recipe, asked: Asked, options: argparse.Namespace) -> None:
        self.recipe, self.recipe_path, self.asked = recipe, options.recipe, asked
        self.out, self.kept, self.into = options.out, options.answers, options.into
        self.only_kept: bool = options.kept
        self.stages = Stages(options.out)

    # Questions and answers --------------------------------------------------------------------------------------------

    @cached_property
    def own(self) -> Path | None:
        """Questions that the target writes; None where none are asked for."""
        asked, path = self.asked, self.kept.with_name("own.jsonl.xz")
        if path.is_file() and asked.ask:
            return path
        if asked.ask == 0 or self.only_kept:  # questions without an answer kept would be dropped again
            return None
        named = self.recipe.target
        target = load_target(named.name, dtype=torch.float32, trust_remote_code=named.trust_remote_code)
        turns = self.stages.stage("own-turns", lambda out: write_turns(target, out, asked.ask, asked.ask_seed))
        rows, dropped = harvest(read_turns(turns))
        write_atomic(path, lzma.compress(jsonl(rows).encode()))
        say(f"own questions: {len(rows)}, dropped: {dropped}; {path}: commit it")
        return path

    @cached_property
    def prompts(self) -> Path:
        """All that is asked, each once; the bank's held-out part as heldout."""
        own = self.own
        own_sha256 = None if own is None else hash_file(own)
        settings = {**self.asked.model_dump(mode="json"), "own_sha256": own_sha256, "only_kept": self.only_kept}
        return self.stages.stage("prompts", lambda out: write_prompts(out, settings, lambda: self.rows(own)))

    def rows(self, own: Path | None) -> list[Row]:
        asked = self.asked
        drawn = [prompt for seed in asked.seeds for prompt in generate(asked.each, seed, "train")]
        rows = [bank_row(prompt) for prompt in drawn]
        if own is not None:
            found = [json.loads(line) for line in lzma.decompress(own.read_bytes()).splitlines()]
            rows += [prompt_row(row["id"], row["messages"], "train", None, "own") for row in found]
        if self.only_kept:
            known = {line["prompt_id"] for line in read_packed(self.kept).lines}
            rows = [row for row in rows if row["id"] in known]
        rows += [bank_row(prompt) for prompt in generate(asked.heldout, asked.heldout_seed, "heldout")]
        return list({row["id"]: row for row in rows}.values())

    @cached_property
    def answers(self) -> Path:
        """The target's answers: those packed are laid, the others made, and all of them packed again."""
        prompts, recipe = self.prompts, self.recipe
        folder, named = self.out / "responses", recipe.target
        if self.kept.is_file() and not folder.exists():
            loaded = load_target(named.name, trust_remote_code=named.trust_remote_code)
            laid = lay(self.kept, prompts, folder, recipe.respond, loaded, named)
            say(f"answers: {laid} laid from {self.kept}")
        fresh = not is_complete(folder)
        self.stages.stage("responses", lambda out: respond(prompts, out, recipe.respond, named))
        if fresh:
            earlier = self.kept if self.kept.is_file() else None
            before = 0 if earlier is None else len(read_packed(earlier).lines)
            header = pack([folder], self.kept, earlier=earlier)
            say(f"answers: {len(header.tokens) - before} new ones packed into {self.kept}: commit it")
        return folder

    # The draft --------------------------------------------------------------------------------------------------------

    @cached_property
    def test(self) -> Path:
        """Captures of the answers to the test set, for evaluation alone."""
        recipe = self.recipe
        rows = [prompt_row(row["id"], row["messages"], "heldout", None, row["kind"]) for row in load_test_set()]
        settings = {"source": "test", "count": len(rows)}
        prompts = self.stages.stage("test-prompts", lambda out: write_prompts(out, settings, lambda: rows))
        answers = self.stages.stage("test-responses", lambda out: respond(prompts, out, recipe.respond, recipe.target))
        exact = recipe.capture.model_copy(update={"precision": "float32", "store": "float32", "split": "heldout"})
        return self.stages.stage("test-captures", lambda out: capture(answers, out, exact, recipe.target))

    @cached_property
    def captures(self) -> Path:
        """Stored states: of held-out topics, and of everything where training is not online."""
        answers, recipe = self.answers, self.recipe
        exact = {"precision": "float32", "store": "float32", "split": "heldout"}
        settings = recipe.capture.model_copy(update=exact) if recipe.train.online else recipe.capture
        return self.stages.stage("captures", lambda out: capture(answers, out, settings, recipe.target))

    @cached_property
    def train(self) -> Path:
        recipe = self.recipe
        data = self.answers if recipe.train.online else self.captures
        return self.stages.stage(
            "draft", lambda out: train(data, out, recipe.train, recipe.draft, recipe.target, recipe.capture)
        )

    @cached_property
    def bench(self) -> Path:
        """Plain against speculative decoding with the weights that will be shipped."""
        draft, recipe = self.train, self.recipe

        def measure() -> JSON:
            rounded(draft, self.out / "rounded")
            return bench(recipe.target, self.out / "rounded", recipe.bench)

        self.stages.result("bench", recipe.bench.model_dump(mode="json"), {"draft": draft}, measure)
        return self.out / "bench" / "result.json"

    @cached_property
    def pack(self) -> Path:
        """Measured on held-out topics and the test set, and put into the package."""
        bench = self.bench
        options = argparse.Namespace(
            draft=self.train,
            responses=self.answers,
            heldout=self.captures,
            test=self.test,
            recipe=self.recipe_path,
            prompts=self.prompts,
            bench=bench,
            steps=self.recipe.evaluate.steps,
            target=self.recipe.target.name,
            out=self.into,
        )
        pack_draft(options)
        return self.into


def write_prompts(out: Path, settings: JSON, rows: Callable[[], list[Row]]) -> Manifest:
    """A prompts folder of rows that no source of `eyas prompts` gives."""
    stage = Stage(out, "prompts", json.loads(json.dumps(settings)), {})
    if (manifest := completed(out, stage.name, stage.settings, {})) is not None:
        return manifest
    found = rows()
    write_atomic(out / PROMPTS, jsonl(found))
    splits = [row["split"] for row in found]
    facts = {"train": splits.count("train"), "heldout": splits.count("heldout"), "source": "shipped"}
    return stage.finish(files={PROMPTS: hash_file(out / PROMPTS)}, facts=facts)


def jsonl(rows: list[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--recipe", type=Path, default=HERE / "shipped.toml")
    add("--asked", type=Path, default=HERE / "prompts.toml")
    add("--out", type=Path, default=Path("runs/shipped"))
    add("--answers", type=Path, default=ANSWERS)
    add("--into", type=Path, default=shipped_root())
    add("--kept", action="store_true", help="ask only what has an answer in --answers")
    add("--until", choices=STEPS, default=STEPS[-1])
    add("--set", dest="sets", action="append", default=[])
    options = parser.parse_args(argv)
    try:
        recipe = load_recipe(str(options.recipe), tuple(options.sets))
        asked = validate(Asked, tomllib.loads(options.asked.read_text("utf-8")), str(options.asked))
        making = Making(recipe, asked, options)
        print(getattr(making, options.until))
    except EyasError as error:
        sys.exit(report(error, []))


if __name__ == "__main__":
    main()
