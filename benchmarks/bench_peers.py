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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peers.answers import Answers, Way
from peers.crew import Bench, Crew, refusal
from peers.engines import ENGINES, PLAIN, Engine, Shape
from peers.figures import miswired, same_texts, table, timing

from eyas.errors import InputError
from eyas.export.folder import export_draft
from eyas.measure import stats
from eyas.measure.prompts import bench_prompts
from eyas.models.checkpoint import load_draft, read_info, save_draft
from eyas.models.resolve import resolve_target
from eyas.models.target import DEFAULT_TARGET, load_target
from eyas.progress import Progress, say
from eyas.recipe import ExportSettings
from eyas.run import hash_file, hash_json, machine, versions, write_atomic
from eyas.shipped import chosen_draft
from eyas.stage import chosen_step

JSON = dict[str, Any]
OUT = Path("bench/out")
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
SCAN_PROMPTS, SCAN_TOKENS = 3, 64


def scan(crew: Crew, engine: Engine) -> Shape:
    """The shape with the most tokens a second on a few prompts, all shapes in turn on each."""
    bench = crew.bench
    few = bench.prompts[:: max(1, len(bench.prompts) // SCAN_PROMPTS)][:SCAN_PROMPTS]
    ids = [prompt.id for prompt in few]
    shapes = [shape for shape in (bench.chain, *bench.scan) if shape.topk == 1 or engine.trees]
    ways = [Way(engine.name, crew.precision, shape) for shape in shapes if not refusal(engine, shape, bench.config)]
    if any(len(bench.answers.of(way, ids, scan=True)) < len(ids) for way in ways):
        for way in ways:
            crew.start(way)
        for prompt in few:
            for way in list(crew.workers):
                crew.ask(way, prompt, min(SCAN_TOKENS, bench.tokens), scan=True)
        crew.stop(list(crew.workers))
    found = {way: bench.answers.of(way, ids, scan=True) for way in ways}
    rates = {way.shape: rate(list(answers.values())) for way, answers in found.items() if len(answers) == len(ids)}
    return max(rates, key=lambda shape: rates[shape]) if rates else bench.chain


def rate(answers: Sequence[JSON]) -> float:
    """Tokens a second of all together."""
    return stats.rates([timing(answer) for answer in answers])["output_tok_s"]


def start_all(bench: Bench, precisions: Sequence[str], engines: Sequence[Engine]) -> JSON:
    """Convert and start every way once, alone: what is compiled or converted is there when it counts."""
    found = {}
    for precision in precisions:
        crew = Crew(bench, precision)
        for engine in engines:
            for shape in dict.fromkeys((PLAIN, bench.chain, *bench.scan)):
                way = Way(engine.name, precision, shape)
                if shape.topk == 1 or engine.trees:
                    crew.start(way)
                    found[str(way)] = crew.voids.get(way, "started")
                    crew.stop(list(crew.workers))
    return found


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
    left = [prompt for prompt in bench.prompts if not bench.answers.whole(crew.workers, prompt.id)]
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
                rows[engine]["facts"] = next(iter(answers[engine].values()), {}).get("facts")
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
        "vllm_compiled": not bench.eager,
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
                made = bench.models(engine, precision)
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
    files = [hash_file(folder / name) for name in ("model.safetensors", "config.json")]
    work = (OUT / "peers" / hash_json([*files, target.identity.weights_hash])[:12]).absolute()
    settings = hash_json([options.tokens, options.threads, options.eager])[:12]
    return Bench(
        target=resolve_target(options.target).absolute(),
        draft=draft.absolute(),
        config=read_info(folder).draft,
        prompts=bench_prompts(options.prompts, target, options.limit, options.tokens),
        stop_ids=sorted(target.stop_ids),
        tokens=options.tokens,
        threads=options.threads,
        eager=options.eager,
        chain=Shape(options.num_steps),
        scan=[Shape.parse(text) for text in options.scan if text != str(options.num_steps)],
        work=work,
        answers=Answers.read(work / f"answers-{settings}.jsonl"),
    )


def export_float32(draft: Path, wide: Path, export: Path) -> None:
    """The one export that every converter starts from: float32, which holds a bfloat16 draft exactly, so that none is
    converted by way of another precision. Raises InputError."""
    save_draft(wide, *load_draft(draft, dtype=torch.float32))
    export_draft(wide, export, ExportSettings())


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
    parser.add_argument("--eager", action="store_true", help="vLLM uncompiled: a tenth slower, starts in seconds")
    parser.add_argument("--prepare", action="store_true", help="convert, and start each way once; measure nothing")
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
        export_float32(bench.draft, bench.work / "float32", bench.export)
    except InputError as error:
        print(json.dumps({"error": error.as_dict()}) if options.json else error, file=sys.stdout)
        sys.exit(2)
    if options.prepare:
        print(json.dumps(start_all(bench, options.precisions, engines), indent=1))
        return
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
