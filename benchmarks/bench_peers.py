"""Eyas beside Hugging Face, vLLM, OpenVINO GenAI and llama.cpp: one run, prompt by prompt, engines in turn.

    python benchmarks/bench_peers.py [--draft DRAFT] [--limit 60] [--tokens 256]      (make bench-peers)

Plain and EAGLE-3 decoding in float32 and in bfloat16, greedily, of the same prompt token ids, each to its own stop id
or --tokens, with the same draft, converted for each engine by its own converter. Each way of decoding is a process of
its own, which stands still (SIGSTOP) while another computes. Accept length is tokens emitted over forwards of the
target, without the prefill's, for all; a peer whose float32 accept length at the same chain is not ours within 5 %
serves another draft, and its rows are void. Writes bench/out/peers.json: `plain_fp32`, `plain_bf16`, `eagle3_fp32`,
`eagle3_bf16` (a chain of --num-steps), and the same with `_best` (the shape that a small scan found fastest).

Stop it at any time: the same command goes on. An engine whose environment is not there has void rows that name the
command to make it; docs/benchmarks.md says what each runs with.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.answers import Answers, Way
from peers.convert import ConvertError, convert, models
from peers.engines import ENGINES, PLAIN, Engine, Shape
from peers.figures import miswired, same_texts, table
from peers.process import Worker, WorkerError

from eyas.errors import InputError
from eyas.export.folder import export_draft
from eyas.formats.draft_config import DraftConfig
from eyas.measure.prompts import BenchPrompt, bench_prompts
from eyas.models.checkpoint import chosen_step, read_info
from eyas.models.target import DEFAULT_TARGET, load_target, resolve_target
from eyas.progress import Progress, say
from eyas.recipe import ExportSettings
from eyas.run import hash_file, hash_json, machine, versions, write_atomic
from eyas.shipped import chosen_draft

JSON = dict[str, Any]
OUT = Path("bench/out")
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
SCAN_PROMPTS, SCAN_TOKENS = 3, 64


@dataclass(frozen=True)
class Bench:
    """What is run, and where it lies."""

    target: Path
    draft: Path
    config: DraftConfig
    prompts: list[BenchPrompt]
    stop_ids: list[int]
    tokens: int
    threads: int
    chain: Shape
    scan: list[Shape]
    work: Path
    answers: Answers

    @property
    def room(self) -> int:
        """Longest text, prompt and all, with a round to spare."""
        return -(-(max(len(prompt.ids) for prompt in self.prompts) + self.tokens + 64) // 64) * 64

    @property
    def ids(self) -> list[str]:
        return [prompt.id for prompt in self.prompts]

    @property
    def export(self) -> Path:
        return self.work / "export"


@dataclass
class Crew:
    """The workers of one precision, and why ways have none."""

    bench: Bench
    precision: str
    workers: dict[Way, Worker] = field(default_factory=dict)
    voids: dict[Way, str] = field(default_factory=dict)
    facts: dict[Way, JSON] = field(default_factory=dict)

    def start(self, way: Way) -> None:
        """Convert, start and warm up; a reason in `voids` where that fails."""
        engine, name = ENGINES[way.engine], f"{way.engine}-{way.precision}-{way.shape}"
        reason = refusal(engine, way.shape, self.bench.config)
        if reason:
            self.voids[way] = reason
            return
        try:
            command = self.command(engine, way)
            say(f"peers: starting {way}")
            log = self.bench.work / "logs" / f"{name}.log"
            self.workers[way] = Worker(command, engine.variables(self.bench.threads), log)
        except (ConvertError, WorkerError) as error:
            self.voids[way] = str(error)
            say(f"peers: {way} is void: {error}")
            return
        self.facts[way] = self.workers[way].facts

    def command(self, engine: Engine, way: Way, *, plan: bool = False) -> list[str | Path]:
        """The worker's command line, once what it loads is made."""
        made = models(engine, way.precision, self.bench.target, self.bench.export, self.bench.work)
        if not plan:
            convert(made, self.bench.work / "logs" / f"{engine.name}-convert.log")
        shape = way.shape
        job = {
            "target": str(made.target),
            "draft": str(made.draft) if shape.num_steps else None,
            "precision": way.precision,
            "shape": {"num_steps": shape.num_steps, "topk": shape.topk, "num_draft_tokens": shape.num_draft_tokens},
            "threads": self.bench.threads,
            "room": self.bench.room,
            "stop_ids": self.bench.stop_ids,
        }
        return [engine.python, engine.script, json.dumps(job)]

    def ask(self, way: Way, prompt: BenchPrompt, tokens: int, *, scan: bool = False) -> None:
        """One answer kept; a worker that fails is void from here on."""
        try:
            answer = self.workers[way].ask(prompt.ids, tokens)
        except WorkerError as error:
            self.voids[way] = str(error)
            say(f"peers: {way} is void: {error}")
            self.stop([way])
            return
        self.bench.answers.add(way, prompt.id, answer, scan=scan)

    def stop(self, ways: Iterable[Way]) -> None:
        for way in list(ways):
            self.workers.pop(way).stop()


def refusal(engine: Engine, shape: Shape, config: DraftConfig) -> str | None:
    """Why a way cannot be run, known before anything is started."""
    if shape.num_steps and (reason := engine.cannot(config)):
        return reason
    return engine.missing()


def scan(crew: Crew, engine: Engine) -> Shape:
    """The shape with the most tokens a second on a few prompts, one worker after the other."""
    bench, rates = crew.bench, {}
    few = bench.prompts[:: max(1, len(bench.prompts) // SCAN_PROMPTS)][:SCAN_PROMPTS]
    ids = [prompt.id for prompt in few]
    for shape in [bench.chain, *bench.scan]:
        if (shape.topk > 1 and not engine.trees) or refusal(engine, shape, bench.config):
            continue
        way = Way(engine.name, crew.precision, shape)
        if len(bench.answers.of(way, ids, scan=True)) < len(ids):
            crew.start(way)
            for prompt in few if way in crew.workers else ():
                if way in crew.workers:
                    crew.ask(way, prompt, min(SCAN_TOKENS, bench.tokens), scan=True)
            crew.stop([way] if way in crew.workers else [])
        found = bench.answers.of(way, ids, scan=True)
        if len(found) == len(ids):
            seconds = sum(answer["seconds_decode"] for answer in found.values())
            rates[shape] = sum(len(answer["ids"]) - 1 for answer in found.values()) / seconds if seconds else 0.0
    return max(rates, key=lambda shape: rates[shape]) if rates else bench.chain


def run(bench: Bench, precision: str, engines: Sequence[Engine]) -> tuple[Crew, dict[str, Shape]]:
    """Every way of every engine on every prompt, who goes first rotating."""
    crew = Crew(bench, precision)
    best = {engine.name: scan(crew, engine) if bench.scan else bench.chain for engine in engines}
    crew.voids.clear()
    ways = [
        Way(engine.name, precision, shape)
        for engine in engines
        for shape in dict.fromkeys((PLAIN, bench.chain, best[engine.name]))
    ]
    able = [way for way in ways if not refusal(ENGINES[way.engine], way.shape, bench.config)]
    left = [prompt for prompt in bench.prompts if not bench.answers.whole(able, prompt.id)]
    for way in ways:
        if left:
            crew.start(way)
        elif reason := refusal(ENGINES[way.engine], way.shape, bench.config):
            crew.voids[way] = reason
    try:
        with Progress(f"peers, {precision}", len(bench.prompts), "prompts", len(bench.prompts) - len(left)) as bar:
            for index, prompt in enumerate(left):
                turn = list(crew.workers)
                for way in turn[index % len(turn) :] + turn[: index % len(turn)] if turn else ():
                    crew.ask(way, prompt, bench.tokens)
                bar.advance(1)
    finally:
        crew.stop(list(crew.workers))
    return crew, best


def report(bench: Bench, engines: Sequence[Engine], done: Mapping[str, tuple[Crew, dict[str, Shape]]]) -> JSON:
    """bench/out/peers.json of what was answered."""
    found: JSON = {}
    reference: dict[str, JSON] = {}
    wrong: dict[str, str] = {}
    for precision, (crew, best) in done.items():
        for name, shapes in (
            ("plain", dict.fromkeys(best, PLAIN)),
            ("eagle3", dict.fromkeys(best, bench.chain)),
            ("best", best),
        ):
            ways = {engine.name: Way(engine.name, precision, shapes[engine.name]) for engine in engines}
            answers = {engine: bench.answers.of(way, bench.ids) for engine, way in ways.items()}
            voids = {engine: crew.voids[way] for engine, way in ways.items() if way in crew.voids}
            if name == "plain":
                reference = reference or answers.get("eyas", {})
            elif name == "eagle3" and precision == "float32":
                wrong = miswired(table(answers, voids))
            rows = table(answers, voids if name == "plain" else wrong | voids)
            for engine, way in ways.items():
                rows[engine] |= {"shape": str(way.shape), "same_texts": same_texts(answers[engine], reference)}
                rows[engine]["facts"] = crew.facts.get(way)
            short = SHORT[precision]
            found[f"eagle3_{short}_best" if name == "best" else f"{name}_{short}"] = rows
    return found


def conditions(bench: Bench) -> JSON:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "draft": str(bench.draft),
        "target": str(bench.target),
        "prompts": len(bench.prompts),
        "max_new_tokens": bench.tokens,
        "num_steps": bench.chain.num_steps,
        "threads": bench.threads,
        "commit": commit.stdout.strip() or None,
        "machine": machine(),
        "versions": versions(),
        "seconds_a_prompt": seconds_a_prompt(bench),
    }


def seconds_a_prompt(bench: Bench) -> float | None:
    """Of all ways in all precisions together."""
    asked = [answer for (scanned, _, _), answer in bench.answers.found.items() if not scanned]
    prompts = {answer["prompt"] for answer in asked}
    return round(sum(answer["seconds_wall"] for answer in asked) / len(prompts), 1) if prompts else None


def plan(bench: Bench, engines: Sequence[Engine], precisions: Sequence[str]) -> JSON:
    """What would be read, converted, started and written."""
    starts = []
    for precision in precisions:
        crew = Crew(bench, precision)
        for engine in engines:
            for shape in (PLAIN, bench.chain):
                way = Way(engine.name, precision, shape)
                made = models(engine, precision, bench.target, bench.export, bench.work)
                starts.append(
                    {
                        "way": str(way),
                        "void": refusal(engine, shape, bench.config),
                        "converts": [str(step.out) for step in made.steps if not step.out.exists()],
                        "command": [str(part) for part in crew.command(engine, way, plan=True)],
                    }
                )
    return {
        "reads": [str(bench.target), str(bench.draft)],
        "writes": [str(OUT / "peers.json"), str(bench.answers.path), str(bench.work)],
        "prompts": len(bench.prompts),
        "answered": sum(not scanned for scanned, _, _ in bench.answers.found),
        "scan": [str(shape) for shape in bench.scan],
        "starts": starts,
    }


def prepare(options: argparse.Namespace) -> Bench:
    """Draft, prompts and folders. Raises InputError."""
    draft, _ = chosen_draft(options.draft, False, options.target)
    if draft is None:
        raise InputError(
            wanted="a draft: none comes with this copy of Eyas",
            got="no --draft",
            where="bench-peers",
            next="eyas run demo, then --draft runs/demo/export",
        )
    target = load_target(options.target)
    folder = chosen_step(draft)
    settings = {
        "draft": hash_file(folder / "model.safetensors"),
        "config": hash_file(folder / "config.json"),
        "target": target.identity.weights_hash,
        "tokens": options.tokens,
        "threads": options.threads,
    }
    name = hash_json(settings)[:12]
    return Bench(
        target=resolve_target(options.target).absolute(),
        draft=draft.absolute(),
        config=read_info(folder).draft,
        prompts=bench_prompts(options.prompts, target, options.limit, options.tokens),
        stop_ids=sorted(target.stop_ids),
        tokens=options.tokens,
        threads=options.threads,
        chain=Shape(options.num_steps),
        scan=[Shape.parse(text) for text in options.scan if text != str(options.num_steps)],
        work=(OUT / "peers" / name).absolute(),
        answers=Answers.read(OUT / "peers" / name / "answers.jsonl"),
    )


def say_table(found: JSON) -> None:
    for name, rows in found.items():
        say(f"{name}:")
        for engine, one in rows.items():
            words = f"{one['tok_s']} tok/s {one['tok_s_interval']}, accept length {one['accept_length']}"
            say(f"  {engine:9s} {words if one['tok_s'] else '-'}" + (f"  VOID: {one['void']}" if one["void"] else ""))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", help="a draft's folder or export; none: the one that comes with Eyas")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--prompts", default="test", help="test, a prompts folder, or a JSONL file of chats")
    parser.add_argument("--limit", type=int, default=60, help="prompts, spread over the source")
    parser.add_argument("--tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--num-steps", type=int, default=5, help="the chain that all are compared at")
    parser.add_argument("--scan", nargs="*", default=["1", "2", "3", "4x2x8"], help="other shapes; none: no scan")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--precisions", nargs="+", default=list(SHORT), choices=list(SHORT))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--plan", action="store_true", help="say what would be read, run and written; start nothing")
    parser.add_argument("--json", action="store_true", help="the report on stdout")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    engines = [ENGINES[name] for name in options.engines]
    try:
        bench = prepare(options)
        if options.plan:
            print(json.dumps(plan(bench, engines, options.precisions), indent=1))
            return
        export_draft(bench.draft, bench.export, ExportSettings())
    except InputError as error:
        print(json.dumps({"error": error.as_dict()}) if options.json else error, file=sys.stdout)
        sys.exit(2)
    done = {}
    found: JSON = {}
    for precision in options.precisions:
        done[precision] = run(bench, precision, engines)
        found = report(bench, engines, done)
        write_atomic(OUT / "peers.json", json.dumps(found | conditions(bench), indent=1) + "\n")
    if options.json:
        print(json.dumps(found | conditions(bench)))
    else:
        say_table(found)
        say(f"wrote {OUT / 'peers.json'}")


if __name__ == "__main__":
    main()
