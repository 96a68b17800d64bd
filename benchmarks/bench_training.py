"""Training beside speculators' and SpecForge's own loss code: the same weights and documents, step by step in turn.

    python benchmarks/bench_training.py [--ttt 3 7] [--answers] [--precision bfloat16]     (make bench-training)

Each trains in a process and an environment of its own; they take turns, one step each, so that a busy machine slows
all three alike. A step is collation, teacher, forward, backward, clipping and AdamW, on documents of one length (no
padding for anybody), in float32, or with products in bfloat16 for all three. `tok_s` are sequence tokens a second, not
times TTT; `cpu_seconds` a step's processor seconds, which other load moves less; `peak_mb` is the process's largest
resident size while stepping. Without --answers every token is in the loss, and all three train the same rows but for a
few at document ends; the first loss, of one document, is held against ours. With it the prompts, a third, are not; the
peers compute their rows all the same.

The head is what each trains it as where nothing is said: frozen by us and speculators, moved by SpecForge; `--head
trained` moves ours too.

The draft is the default target's, 576 wide, with a vocabulary of 8192 out of 49152. Writes bench/out/training.json: for
each program its figures in the setting where Eyas gains least, and every setting under `runs`.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/conformance"))

from worker_loop import optimiser_step, serve

from eyas.models.vocab import draft_ids
from eyas.recipe import TrainSettings
from eyas.run import machine, versions, write_atomic
from eyas.training.loop import row_weights
from eyas.training.loss import Batch, ttt_loss
from eyas.training.start import trainable
from eyas.training.teacher import Teacher
from peer_cases import DECAY, Case, Material, batch_of, material, teacher_of, write_case

HERE = Path(__file__).parent
OUT = Path("bench/out/training.json")
PEERS = ("speculators", "specforge")
SHAPE: dict[str, Any] = {
    "boundaries": (2, 15, 27),
    "target_num_hidden_layers": 30,
    "target_hidden_size": 576,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "draft_vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
}
LENGTH, PROMPT = 204, 64
"""Of the demo's conversations, on average."""


def case_of(steps: int, answers: bool, documents: int) -> Case:
    return Case(
        f"ttt{steps}" + ("_answers" if answers else ""),
        (),
        steps,
        SHAPE,
        lengths=(LENGTH,) * documents,
        prompts=(PROMPT if answers else 0,) * documents,
        gradients=not answers,
    )


def made_for(case: Case) -> Material:
    """Every choice of the target can be said by the draft, as nearly all are in its own answers: no row is left out."""
    made = material(case)
    made.head_VH[~made.draft.t2d] *= 0.01
    teacher = teacher_of(made)
    for one in made.documents:
        one.argmax_L = (teacher.normed(one.last_hidden_LH) @ made.head_VH.T).argmax(-1)
    return made


def serve_eyas(case: Case, dtype: torch.dtype, head: str) -> None:
    """What `Trainer.advance` does with one batch; the facts are the loss as each peer counts it."""
    made = made_for(case)
    draft, teacher = trainable(made.draft, head), teacher_of(made)
    to_draft, update = draft_ids(draft.t2d), optimiser_step(draft.parameters())
    by_kept = TrainSettings(ttt_length=case.steps, step_decay=DECAY, denominator="supervised")
    by_all = TrainSettings(ttt_length=case.steps, step_decay=DECAY, denominator="all")

    def advance(documents: int | None) -> dict[str, Any]:
        batch = batch_of(case, replace(made, documents=made.documents[:documents]))
        weights = row_weights([batch], draft.t2d, by_kept)
        loss, sums = ttt_loss(draft, batch, teacher, to_draft, weights, dtype)
        loss.backward()
        update()
        if documents is None:
            return {}
        logged = loss.item() - entropy(batch, teacher, weights)
        weights = row_weights([batch], draft.t2d, by_all)
        summed = sum(weight * one for weight, one in zip(weights, sums.loss.tolist(), strict=True))
        return {"speculators": logged, "specforge": summed}

    serve(advance)


def entropy(batch: Batch, teacher: Teacher, weights: list[float]) -> float:
    """The teacher's, which speculators takes off the cross-entropy."""
    total = 0.0
    for step, (index, weight) in enumerate(zip(batch.rows.index, weights, strict=True)):
        teacher_RD = teacher.probabilities(batch.last_hidden_TH[index + 1 + step])
        total -= weight * float(torch.xlogy(teacher_RD, teacher_RD).sum())
    return total


class Worker:
    """A process that steps when told to."""

    def __init__(self, command: list[str | Path], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self.answer()
        self.steps: list[dict[str, float]] = []

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}: its error is above")
        return json.loads(line)

    def ask(self, line: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def step(self) -> None:
        self.steps.append(self.ask())

    def stop(self) -> None:
        self.process.communicate()


def peers_environment(compiled: bool = False) -> dict[str, str]:
    """Ours without what would lead into our own packages."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "0" if compiled else "1"}
    return kept | quiet


def measure(case: Case, options: argparse.Namespace, precision: str) -> dict[str, Any]:
    """One setting: all three, in turn."""
    theirs = peers_environment(options.compiled)
    threading = {"OMP_NUM_THREADS": str(options.threads), "EYAS_BENCH_THREADS": str(options.threads)}
    with tempfile.TemporaryDirectory() as folder:
        write_case(Path(folder), case, made_for(case))
        place = Path(folder) / case.name
        ours = [
            sys.executable,
            HERE / "bench_training.py",
            "--worker",
            case.name,
            "--documents",
            str(len(case.lengths)),
            "--precision",
            precision,
            "--head",
            options.head,
        ]
        workers = {"eyas": Worker(ours, dict(os.environ) | threading)}
        for peer in PEERS:
            workers[peer] = Worker(
                [options.peers_python, HERE / "training_peers.py", peer, place, precision], theirs | threading
            )
    for _ in range(options.rounds):
        for worker in workers.values():
            worker.step()
    for worker in workers.values():
        worker.stop()
    tokens = sum(case.lengths)
    found: dict[str, Any] = {"setting": case.name, "precision": precision, "tokens": tokens}
    for name, worker in workers.items():
        seconds = [step["seconds"] for step in worker.steps]
        found[name] = {
            "tok_s": round(tokens / statistics.median(seconds), 1),
            "cpu_seconds": round(statistics.median(step["cpu_seconds"] for step in worker.steps), 3),
            "peak_mb": round(worker.steps[-1]["peak_mb"]),
            "resting_mb": round(worker.steps[-1]["resting_mb"]),
        }
    for peer in PEERS:
        pairs = list(zip(workers[peer].steps, workers["eyas"].steps, strict=True))
        for clock, key in (("seconds", f"times_{peer}"), ("cpu_seconds", f"cpu_times_{peer}")):
            ratios = [theirs[clock] / ours[clock] for theirs, ours in pairs]
            found[key] = [round(ratio, 2) for ratio in (statistics.median(ratios), min(ratios), max(ratios))]
        if case.gradients:
            loss, wanted = workers["eyas"].first[peer], workers[peer].first["loss"]
            found[f"loss_{peer}"] = {"eyas": loss, "theirs": wanted, "apart": abs(loss / wanted - 1)}
    return found


def worst(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the setting in which we gain least over the better of the two."""
    return min(runs, key=lambda run: min(run[f"times_{peer}"][0] for peer in PEERS))


def say(run: dict[str, Any]) -> None:
    print(f"{run['setting']}, {run['precision']}: {run['tokens']} tokens a step")
    for name in ("eyas", *PEERS):
        line = f"  {name:12s} {run[name]['tok_s']:8.1f} tok/s, peak {run[name]['peak_mb']} MB"
        if name in PEERS:
            middle, low, high = run[f"times_{name}"]
            line += f"; eyas {middle} times as fast ({low} to {high})"
            line += ", {} times ({} to {}) by processor seconds".format(*run[f"cpu_times_{name}"])
        if f"loss_{name}" in run:
            line += f"; first loss apart by {run[f'loss_{name}']['apart']:.1e}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ttt", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--answers", action="store_true", help="prompts out of the loss")
    parser.add_argument("--documents", type=int, help=f"of {LENGTH} tokens, in a step (10 at TTT 3, 4 at TTT 7)")
    parser.add_argument("--precision", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--head", choices=("frozen", "trained"), default=TrainSettings().head, help="ours")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="with SpecForge's torch.compile")
    parser.add_argument(
        "--peers-python", type=Path, default=os.environ.get("EYAS_PEERS_PYTHON", ".venv-peers/bin/python")
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        steps, answers = options.worker.removeprefix("ttt").split("_")[0], options.worker.endswith("_answers")
        case = case_of(int(steps), answers, options.documents)
        serve_eyas(case, getattr(torch, options.precision[0]), options.head)
        return
    runs = []
    for steps, precision in itertools.product(options.ttt, options.precision):
        case = case_of(steps, options.answers, options.documents or max(1, 30 // steps))
        runs.append(measure(case, options, precision))
        say(runs[-1])
    found = worst(runs)
    report = {name: found[name] for name in ("eyas", *PEERS)} | {
        "setting": found["setting"],
        "precision": found["precision"],
        "runs": runs,
    }
    report |= {name: getattr(options, name) for name in ("threads", "compiled", "head")}
    report |= {"machine": machine(), "versions": versions()}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(OUT, json.dumps(report, indent=1) + "\n")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
