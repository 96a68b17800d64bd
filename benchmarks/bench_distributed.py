"""Training tokens a second by two processes over one, each with one thread: `make bench-distributed`.

    python benchmarks/bench_distributed.py --tokens 256 2048 --parallel ddp fsdp [--processes 2] [--seconds 12]
        [--optimiser muon] [--precision bfloat16] [--head trained]

Whole optimiser steps (`Trainer.advance`: reading, teacher, loss, gradients summed over processes, clipping, the
weights' move) on random states of the default target's shape. Both take the same global batch; the order of runs
alternates, and the ratio is that of the best runs. `apart` is what the machine's cores allow: as many processes that
know nothing of each other, each with its part of the batch and, as it is alone, with the whole of the optimiser's
work. Writes `bench/out/distributed.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_train import HIDDEN, LENGTH, PROMPT, VOCAB, RandomTeacher, shape
from torch import Tensor

from eyas.data.shards import Entry, NormState, Sample
from eyas.models.checkpoint import DraftInfo
from eyas.models.draft import Draft
from eyas.models.target import DTYPES
from eyas.models.vocab import build_vocab
from eyas.recipe import TrainSettings
from eyas.run import machine, versions, write_atomic
from eyas.training.batches import Batches
from eyas.training.distributed import joined
from eyas.training.loop import Trainer
from eyas.training.start import trainable

OUT = Path("bench/out/distributed.json")
Run = dict[str, Any]
DRAFT_VOCAB = 8192


class RandomSamples:
    """Answers of the default target's usual length, each the same states: what is read costs what reading costs."""

    boundaries = (2, 15, 27)
    last_hidden_norm: NormState = "before"
    greedy = True

    def __init__(self, count: int) -> None:
        self.samples = [Entry(str(number), "train", "", 0, LENGTH, PROMPT) for number in range(count)]
        generator = torch.Generator().manual_seed(0)
        self.taps = torch.randn(LENGTH, 3 * HIDDEN, generator=generator)
        self.last = torch.randn(LENGTH, HIDDEN, generator=generator)
        self.ids_T = torch.randint(0, DRAFT_VOCAB, (LENGTH,), generator=generator)

    def read_all(self, numbers: Sequence[int]) -> list[Sample]:
        states = (self.taps, self.last, self.ids_T)
        return [Sample(str(n), "train", *(t.clone() for t in states), self.mask(n)) for n in numbers]

    def mask(self, number: int) -> Tensor:
        return torch.arange(LENGTH) >= PROMPT

    def ids(self, number: int) -> list[int]:
        return self.ids_T.tolist()

    def of_split(self, split: str) -> list[int]:
        return list(range(len(self.samples)))


def work(options: argparse.Namespace) -> None:
    """One of the processes, or the only one: a line of JSON by the first."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = []
    with joined(TrainSettings(rank_timeout_s=60, device="cpu")) as ranks:
        for parallel in options.parallel if ranks.size > 1 else ["alone"]:
            for tokens in options.tokens:
                trainer = made(tokens, "ddp" if parallel == "alone" else parallel, ranks, options)
                first = trainer.advance()
                started, steps = time.perf_counter(), 0
                while not ranks.any(time.perf_counter() - started > options.seconds):
                    trainer.advance()
                    steps += 1
                seconds = (time.perf_counter() - started) / steps
                done = {"tokens": trainer.tokens // trainer.step, "tok_s": trainer.tokens / trainer.step / seconds}
                found.append({"parallel": parallel, "batch_tokens": tokens, "loss": first["loss"], **done})
        if ranks.leads:
            print(json.dumps(found), flush=True)


def made(tokens: int, parallel: Any, ranks: Any, options: argparse.Namespace) -> Trainer:
    """A trainer of the default target's draft whose steps have `tokens` or a little less."""
    count = max(2, tokens // LENGTH)
    samples, steps = RandomSamples(count), 10_000
    torch.manual_seed(0)
    config = shape(DRAFT_VOCAB)
    draft = Draft(config)
    draft.share_embedding(torch.randn(VOCAB, HIDDEN))
    draft.d2t, draft.t2d = build_vocab(torch.arange(VOCAB, 0, -1), DRAFT_VOCAB)
    most = max(tokens, count * LENGTH)
    moved: Any = {"precision": options.precision, "optimiser": options.optimiser, "head": options.head}
    settings = TrainSettings(batch_tokens=most, parallel=parallel, **moved)
    trainable(draft, settings.head)
    teacher: Any = RandomTeacher(DRAFT_VOCAB)
    batches = Batches(samples, teacher, steps=settings.ttt_length, loss_on="assistant", argmax_file=Path(os.devnull))
    plan = [[list(range(count))]] * steps
    info: Any = DraftInfo.model_construct()
    dtype = DTYPES[options.precision]
    return Trainer(draft, info, teacher, batches, plan, [LENGTH] * count, settings, dtype, ranks)


def together(processes: int, options: argparse.Namespace) -> list[Run]:
    """One process, or several by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return lines_of(started([] if processes == 1 else torchrun, options.tokens, options))


def apart(options: argparse.Namespace) -> list[Run]:
    """As many single processes side by side, each with its part of the batch: their tokens a second, summed."""
    parts = [tokens // options.processes for tokens in options.tokens]
    running = [started([], parts, options) for _ in range(options.processes)]
    found = [lines_of(process) for process in running]
    summed = [{key: sum(one[key] for one in ones) for key in ("tokens", "tok_s")} for ones in zip(*found, strict=True)]
    return [{"parallel": "apart", "batch_tokens": n, **sums} for n, sums in zip(options.tokens, summed, strict=True)]


def started(launcher: list[str], tokens: list[int], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    flags = ["--work", "--tokens", *map(str, tokens), "--parallel", *options.parallel]
    flags += ["--optimiser", options.optimiser, "--precision", options.precision, "--head", options.head]
    command = [sys.executable, *launcher, __file__, *flags, "--seconds", str(options.seconds)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)


def lines_of(process: subprocess.Popen[bytes]) -> list[Run]:
    told, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return json.loads(told.decode().strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--parallel", nargs="+", default=["ddp"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--optimiser", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--head", choices=("frozen", "trained"), default=TrainSettings().head)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    runs: dict[tuple[str, int], list[Run]] = {}
    ways = (lambda: together(1, options), lambda: together(options.processes, options), lambda: apart(options))
    for pair in range(options.pairs):
        for way in ways if pair % 2 == 0 else ways[::-1]:
            for one in way():
                print(one, file=sys.stderr, flush=True)
                runs.setdefault((one["parallel"], one["batch_tokens"]), []).append(one)
    best = {key: max(found, key=lambda one: one["tok_s"]) for key, found in runs.items()}
    rows = []
    for (parallel, tokens), many in best.items():
        if parallel == "alone":
            continue
        alone = best["alone", tokens]
        ratio = many["tok_s"] / alone["tok_s"]
        row = {"parallel": parallel, "batch_tokens": many["tokens"], "processes": options.processes, "ratio": ratio}
        row |= {name: getattr(options, name) for name in ("optimiser", "precision", "head")}
        losses = [one["loss"] for one in (many, alone) if "loss" in one]
        rows.append(row | {"tok_s": many["tok_s"], "tok_s_alone": alone["tok_s"], "losses": losses})
        told = f"{many['tok_s']:,.0f} tokens/s by {options.processes} processes, {alone['tok_s']:,.0f} by one"
        print(f"{parallel}, {many['tokens']} tokens a step: {told}: {ratio:.2f} times")
    facts = {"machine": machine(), "versions": versions(), "runs": [one for found in runs.values() for one in found]}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(OUT, json.dumps({"rows": rows, **facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
