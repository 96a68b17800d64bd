"""The embedded engine on the default target, as paired ratios of one run; writes bench/out/engine.json.

    python benchmarks/bench_engine.py [--draft DRAFT] [--target T] [--limit 200] [--tokens 256] [--profile] [--costs]

Every prompt is decoded every way, one after the other, the order rotating: Hugging Face generate in bfloat16, the
engine plain in bfloat16 and in int8, in bfloat16 under a simulated accept length of 3, and with --draft by that draft.
Without --draft an untrained one of the default shape drafts for the simulation: costs do not depend on what it drafts.
Stop it at any time: what was measured is reported, and the same command on the same commit goes on (bench/out/engine/).
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from eyas.data.responses import cut_torn_line
from eyas.engine.costs import measure_costs
from eyas.engine.generate import Engine
from eyas.engine.native_build import load_native
from eyas.engine.native_forward import NativeForward
from eyas.engine.spans import NoSpans, Spans
from eyas.formats.taps import default_boundaries
from eyas.measure.prompts import BenchPrompt, bench_prompts, spread
from eyas.measure.stats import accept_length
from eyas.models.checkpoint import CONFIG, WEIGHTS, load_draft
from eyas.models.draft import Draft
from eyas.models.target import DEFAULT_TARGET, Target, load_target
from eyas.progress import Progress, say
from eyas.recipe import DraftSettings
from eyas.run import JSON, hash_file, hash_json, machine, versions
from eyas.settings import DraftingSettings
from eyas.shipped import draft_folder
from eyas.stage import chosen_step
from eyas.training.initialise import draft_config

CURVE = (0.81, 0.66, 0.53)
"""Survival of a chain of three whose accept length is 3.0."""
OFF = NoSpans()
OUT = Path("bench/out/engine.json")


@dataclass
class Way:
    """One way of decoding: a prompt to (tokens after the first, seconds after the first token)."""

    run: Callable[[BenchPrompt], tuple[int, float]]
    timed: list[tuple[int, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second, of all prompts together."""
        return sum(tokens for tokens, _ in self.timed) / sum(seconds for _, seconds in self.timed)


@dataclass
class Turns:
    """What every way made of every prompt: a line a prompt in `path`, which a later run goes on from."""

    path: Path
    ways: dict[str, Way] = field(default_factory=dict)
    spans: dict[str, Spans] = field(default_factory=dict)
    """Where the rounds of some ways spend their time."""
    rounds: list[int] = field(default_factory=list)
    """Tokens of each of the draft's rounds."""

    def alternate(self, prompts: Sequence[BenchPrompt]) -> int:
        """Every way on every prompt, who goes first rotating; a first round is left out.

        Returns the number of prompts done: an interrupt ends it early.
        """
        done = self._earlier({prompt.id for prompt in prompts})
        for line in done.values():
            self._count(line)
        left = [(index, prompt) for index, prompt in enumerate(prompts) if prompt.id not in done]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        count = len(done)
        try:
            with self.path.open("a") as file, Progress("engine", len(prompts), "prompts", count) as bar:
                if left:
                    self._turn(0, prompts[0])
                for index, prompt in left:
                    line = self._turn(index, prompt)
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    self._count(line)
                    count += 1
                    bar.advance(1)
        except KeyboardInterrupt:
            say("interrupted: what was measured is reported; the same command goes on")
        return count

    def _turn(self, index: int, prompt: BenchPrompt) -> JSON:
        """One prompt every way; what its rounds told is taken out of `spans` and `rounds` into the line."""
        before = {name: dict(spans.seconds) for name, spans in self.spans.items()}
        rounds = len(self.rounds)
        names = list(self.ways)
        turn = names[index % len(names) :] + names[: index % len(names)]
        timed = {name: self.ways[name].run(prompt) for name in turn}
        spent = {
            name: {lap: whole - before[name].get(lap, 0.0) for lap, whole in spans.seconds.items()}
            for name, spans in self.spans.items()
        }
        line = {"prompt": prompt.id, "timed": timed, "rounds": self.rounds[rounds:], "spans": spent}
        for name, spans in self.spans.items():
            spans.seconds = before[name]
        del self.rounds[rounds:]
        return line

    def _count(self, line: JSON) -> None:
        for name, (tokens, seconds) in line["timed"].items():
            self.ways[name].timed.append((tokens, seconds))
        self.rounds += line["rounds"]
        for name, spans in self.spans.items():
            for lap, seconds in line["spans"][name].items():
                spans.seconds[lap] = spans.seconds.get(lap, 0.0) + seconds

    def _earlier(self, prompts: Container[str]) -> dict[str, JSON]:
        """Lines of an earlier run by prompt; one cut off by its end is dropped."""
        if not self.path.is_file():
            return {}
        cut_torn_line(self.path)
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {line["prompt"]: line for line in lines if line["prompt"] in prompts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", type=draft_folder, help="a draft's folder, or shipped")
    parser.add_argument("--num-steps", type=int, default=2, help="depth of --draft's chain")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--limit", type=int, default=200, help="prompts, spread over the test set")
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--profile", action="store_true", help="print where rounds spend their time")
    parser.add_argument("--costs", action="store_true", help="print what rounds of each depth cost, and stop")
    args = parser.parse_args()
    if args.costs:
        for precision in ("float32", "bfloat16", "int8"):
            print(json.dumps({"precision": precision, **costs(args.target, args.draft, precision)}))
        return
    report = measure(args) | {"machine": machine(), "versions": versions(), "threads": torch.get_num_threads()}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def measure(args: argparse.Namespace) -> dict[str, object]:
    started = time.perf_counter()
    target = load_target(args.target, dtype="bfloat16")
    draft = make_draft(target, args.draft)
    simulated = Engine(target, draft, drafting=DraftingSettings(num_steps=3, simulate=CURVE))
    prompts = bench_prompts("test", target, None, args.tokens)
    first = simulated.generate(prompts[0].ids, 2)
    start_seconds = time.perf_counter() - started - first.seconds_decode
    rounded = Engine(
        target, make_draft(target, args.draft), drafting=simulated.drafting, draft_int8=True, announce=False
    )
    int8 = Engine(load_target(args.target, dtype="bfloat16"), int8=True)
    hugging_face = load_target(args.target, dtype="bfloat16")
    turns = Turns(kept(args, target))
    turns.spans["simulated_bf16"] = Spans()
    ways = turns.ways = {
        "hf": Way(lambda prompt: generate(hugging_face, prompt, args.tokens)),
        "plain_bf16": Way(lambda prompt: decode(simulated, prompt, args.tokens, 0)),
        "plain_int8": Way(lambda prompt: decode(int8, prompt, args.tokens, 0)),
        "simulated_bf16": Way(lambda prompt: decode(simulated, prompt, args.tokens, 3, turns.spans["simulated_bf16"])),
        "simulated_bf16_draft_int8": Way(lambda prompt: decode(rounded, prompt, args.tokens, 3)),
    }
    steps: int = args.num_steps
    if args.draft:
        real = Engine(
            load_target(args.target, dtype="bfloat16"), make_draft(target, args.draft), num_steps=args.num_steps
        )
        turns.spans["draft_bf16"] = Spans()
        ways["draft_bf16"] = Way(
            lambda prompt: decode(real, prompt, args.tokens, steps, turns.spans["draft_bf16"], turns.rounds)
        )
    done = turns.alternate(spread(prompts, min(args.limit, len(prompts))))
    if not done:
        sys.exit("interrupted before the first prompt: nothing to report")
    rounds, shares = turns.rounds, {name: spans.shares() for name, spans in turns.spans.items()}
    rates = {name: way.rate for name, way in ways.items()}
    floors = {"": floor(simulated, rates["plain_bf16"]), "_int8": floor(int8, rates["plain_int8"])}
    if args.profile:
        print(json.dumps({"round": shares}))
    return {
        "plain_bf16_over_hf": ratio(ways, "plain_bf16", "hf"),
        "plain_int8_over_bf16": ratio(ways, "plain_int8", "plain_bf16"),
        "speedup_at_simulated_3": ratio(ways, "simulated_bf16", "plain_bf16"),
        "speedup_at_simulated_3_draft_int8": ratio(ways, "simulated_bf16_draft_int8", "plain_bf16"),
        "fraction_of_floor": floors[""],
        "fraction_of_floor_int8": floors["_int8"],
        "accept_length": round(accept_length(rounds), 3) if rounds else None,
        "speedup": ratio(ways, "draft_bf16", "plain_bf16") if rounds else None,
        "num_steps": args.num_steps if rounds else None,
        "round_shares": shares["simulated_bf16"],
        "draft_round_shares": shares.get("draft_bf16"),
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "seconds_to_first_token": round(start_seconds, 2),
        "engine": simulated.facts.describe(),
        "prompts": done,
        "max_new_tokens": args.tokens,
    }


def kept(args: argparse.Namespace, target: Target) -> Path:
    """Where this measurement's lines are: another draft, target, length or commit has a file of its own."""
    files = [] if args.draft is None else [hash_file(chosen_step(args.draft) / name) for name in (WEIGHTS, CONFIG)]
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()
    words = [*files, target.identity.weights_hash, args.tokens, args.num_steps, torch.get_num_threads(), commit]
    return OUT.with_suffix("") / f"{hash_json(words)[:12]}.jsonl"


def decode(
    engine: Engine,
    prompt: BenchPrompt,
    tokens: int,
    num_steps: int,
    spans: NoSpans = OFF,
    rounds: list[int] | None = None,
) -> tuple[int, float]:
    engine.spans = spans
    run = engine.generate(prompt.ids, tokens, num_steps)
    if rounds is not None:
        rounds += run.rounds
    return len(run.ids) - 1, run.seconds_decode


@torch.inference_mode()
def generate(target: Target, prompt: BenchPrompt, tokens: int) -> tuple[int, float]:
    """Hugging Face's own, a prefill of the same prompt taken off."""
    ids = torch.tensor([prompt.ids])

    def timed(count: int) -> tuple[int, float]:
        started = time.perf_counter()
        output = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=2
        )
        return output.shape[1] - ids.shape[1], time.perf_counter() - started

    count, seconds = timed(tokens)
    return count - 1, max(seconds - timed(1)[1], 1e-9)


def floor(engine: Engine, rate: float) -> float | None:
    """The time that reading the weights takes at this machine's bandwidth, over a plain step's."""
    if not isinstance(engine.forward, NativeForward):
        return None
    weight_bytes = engine.forward.weight_bytes
    return round(weight_bytes / bandwidth(weight_bytes) * rate, 3)


def bandwidth(size: int) -> float:
    """Bytes a second over `size` bytes, best of several, with the engine's own threads."""
    library = load_native()
    assert isinstance(library, ctypes.CDLL), "the compiled path runs, so its library is there"
    memory = torch.ones(size, dtype=torch.int8)
    best = float("inf")
    for _ in range(7):
        started = time.perf_counter()
        library.eyas_read(memory.data_ptr(), size, torch.get_num_threads())
        best = min(best, time.perf_counter() - started)
    return size / best


def make_draft(target: Target, folder: Path | None) -> Draft:
    if folder is not None:
        return load_draft(folder, target.embedding, target.dtype)[0]
    torch.manual_seed(0)
    boundaries = default_boundaries(target.num_hidden_layers)
    return Draft(draft_config(target, boundaries, DraftSettings()))


def costs(name: str, folder: Path | None, precision: str) -> dict[str, object]:
    """A plain step in ms; everything else in plain steps."""
    int8 = precision == "int8"
    target = load_target(name, dtype="bfloat16" if int8 else precision)
    found = measure_costs(target, make_draft(target, folder), range(1, 6), int8=int8, draft_int8=int8)
    return {
        "plain_step_ms": round(found.plain * 1e3, 2),
        "verify_rows": {depth + 1: round(seconds / found.plain, 3) for depth, seconds in found.verify.items()},
        "draft_chain": {depth: round(seconds / found.plain, 3) for depth, seconds in found.draft.items()},
        "break_even_accept_length": {depth: round(found.round(depth) / found.plain, 3) for depth in found.verify},
    }


def ratio(ways: dict[str, Way], over: str, under: str) -> float:
    """The median over prompts of one way's rate over another's: a stolen core spoils a prompt, not the run."""
    pairs = zip(ways[over].timed, ways[under].timed, strict=True)
    return round(
        median(tokens / seconds / (others / spent) for (tokens, seconds), (others, spent) in pairs if others), 3
    )


if __name__ == "__main__":
    main()
