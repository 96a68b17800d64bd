"""`eyas train`: captures in, a draft out.

The run is planned from sample lengths alone (which samples in which step), so a checkpoint's step number is the whole
cursor: a run that was killed goes on to the same weights, bit for bit on a CPU.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from eyas.data.shards import Samples
from eyas.errors import InputError
from eyas.models.checkpoint import DraftInfo
from eyas.models.draft import Draft
from eyas.models.target import DTYPES, Target, fastest_dtype, load_target
from eyas.models.vocab import coverage, draft_ids, target_ids
from eyas.progress import Progress, say
from eyas.recipe import CaptureSettings, DraftSettings, TargetSettings, TrainSettings
from eyas.run import Manifest, hash_file, read_manifest
from eyas.stage import Stage, begin
from eyas.training.batches import Batches, order, pack
from eyas.training.heldout import HeldOut
from eyas.training.initialise import count_tokens
from eyas.training.inputs import check_captures
from eyas.training.loss import Batch, Sums, in_vocabulary, ttt_loss
from eyas.training.metrics import EVENTS, HELD_OUT, METRICS, Metrics
from eyas.training.objectives import Objective, objective_of
from eyas.training.optimise import Optimiser, learning_rate, make_optimiser, trained
from eyas.training.start import open_samples, starting_draft, trainable
from eyas.training.teacher import Teacher
from eyas.training.trainer_state import load_checkpoint, restore, save_step, step_folders


@dataclass
class Trainer:
    """One run: what is trained, on what, and how far it is."""

    draft: Draft
    info: DraftInfo
    optimiser: Optimiser
    teacher: Teacher
    batches: Batches
    plan: list[list[list[int]]]
    """Optimiser steps, each of packed batches, each of sample indices."""
    lengths: list[int]
    settings: TrainSettings
    dtype: torch.dtype
    step: int = 0
    tokens: int = 0
    draft_of_V: Tensor = field(init=False)
    objective: Objective = field(init=False)

    def __post_init__(self) -> None:
        self.draft_of_V = draft_ids(self.draft.t2d)
        self.objective = objective_of(self.settings)

    def advance(self) -> dict[str, Any]:
        """One optimiser step; its line of metrics. Raises InputError where the loss is not finite."""
        settings, device = self.settings, self.draft.fc.weight.device
        batches = [self.batches.load(indices, device) for indices in self.plan[self.step]]
        weights = row_weights(batches, self.draft.t2d, settings)
        rate = learning_rate(self.step, len(self.plan), settings)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        total, sums = 0.0, None
        for batch in batches:
            loss, added = self.loss(batch, weights)
            if not math.isfinite(loss.item()):
                raise self.not_finite("loss", loss.item(), [batch], weights)
            loss.backward()
            total += loss.item()
            sums = added if sums is None else sums + added
        assert sums is not None, "a step has a batch"
        norm = torch.nn.utils.clip_grad_norm_(list(trained(self.draft).values()), settings.clip_norm)
        if not math.isfinite(norm.item()):
            raise self.not_finite("gradient norm", norm.item(), batches, weights)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        tokens = sum(self.lengths[index] for indices in self.plan[self.step - 1] for index in indices)
        self.tokens += tokens
        return metrics(self.step, self.tokens, total, sums, rate, norm.item())

    def loss(self, batch: Batch, weights: list[float]) -> tuple[Tensor, Sums]:
        return ttt_loss(self.draft, batch, self.teacher, self.draft_of_V, weights, self.dtype, self.objective)

    def not_finite(self, what: str, value: float, batches: list[Batch], weights: list[float]) -> InputError:
        """Which samples it was: those whose states are not finite, else those that do it alone, else all of them."""
        names = [name for batch in batches for name in batch.samples]
        bad = [name for batch in batches for name in batch.with_bad_states()]
        named = bad or self.bad_alone(names, weights) or names
        return InputError(
            wanted=f"a finite {what} at step {self.step + 1}",
            got=f"{value}; {'states that are not finite in' if bad else 'samples'}: {', '.join(named)}",
            where="captures" if bad else "train",
            next="capture those samples again"
            if bad
            else "--set train.learning_rate lower; the last checkpoint is kept",
        )

    def bad_alone(self, names: list[str], weights: list[float]) -> list[str]:
        """Of these samples of the step at work, those whose own loss or gradient is not finite."""
        device = self.draft.fc.weight.device
        indices = [index for indices in self.plan[self.step] for index in indices]
        found = []
        for index in indices:
            batch = self.batches.load([index], device)
            if batch.samples[0] not in names:
                continue
            self.optimiser.zero_grad()
            loss, _ = self.loss(batch, weights)
            loss.backward()
            gradients = [p.grad for p in trained(self.draft).values() if p.grad is not None]
            if not math.isfinite(loss.item()) or not all(bool(gradient.isfinite().all()) for gradient in gradients):
                found.append(batch.samples[0])
        return found


def train(
    data: Path,
    out: Path,
    settings: TrainSettings | None = None,
    draft: DraftSettings | None = None,
    target: TargetSettings | None = None,
    capture: CaptureSettings | None = None,
) -> Manifest:
    """Train a draft on `data` into `out/step-N`, resuming what is there.

    `data` is a captures folder, or a responses folder: then the target runs beside the trainer and makes the states
    that `capture` asks for. Raises InputError for data of another target, tokenizer or shape, an empty mask, an `out`
    made under other settings, a loss that is not finite (the samples are named, the last checkpoint is kept), a full
    disk.
    """
    settings, shape, named = settings or TrainSettings(), draft or DraftSettings(), target or TargetSettings()
    manifest = read_manifest(data)
    online = data_is_online(manifest, settings, data)
    settings = settings.model_copy(update={"online": online})
    capture = capture or CaptureSettings()
    parts = {"train": settings, "draft": shape, "target": named} | ({"capture": capture} if online else {})
    recorded = {part: model.model_dump(mode="json") for part, model in parts.items()}
    stage = begin(out, "draft", recorded, {manifest.stage: data})
    if stage.complete is not None:
        return stage.complete
    loaded = load_target(named.name, trust_remote_code=named.trust_remote_code)
    samples = open_samples(data, manifest, loaded, named, capture, stage)
    check_captures(manifest, samples, loaded, where=data)
    chosen = samples.of_split("train")
    counts_V = count_tokens(samples, chosen, settings.loss_on, loaded.vocab_size)
    if "precision" not in stage.decided:  # a resume computes as the run began, whatever is faster today
        stage.save(precision=precision(settings))
    trainer = prepare(stage, loaded, samples, manifest, counts_V, settings, shape)
    step, measured = run(trainer, stage, held_out(trainer, samples))
    facts = {
        "draft": step.name,
        "target": loaded.identity.model_dump(mode="json"),
        "tokenizer_hash": loaded.tokenizer_hash,
        "template_hash": loaded.template_hash,
        "vocabulary_coverage": round(coverage(counts_V, trainer.draft.t2d.cpu()), 6),
        "tokens": trainer.tokens,
        "steps": trainer.step,
        "precision": stage.decided["precision"],
        **measured,
    }
    paths = (*sorted(step.iterdir()), out / METRICS, out / EVENTS)
    files = {str(path.relative_to(out)): hash_file(path) for path in paths}
    return stage.finish(files=files, facts=facts)


def data_is_online(manifest: Manifest, settings: TrainSettings, data: Path) -> bool:
    """Whether `data` are responses, whose states the target must make. Raises InputError for any other stage's folder,
    and for captures under `train.online`."""
    wanted = ("responses",) if settings.online else ("captures", "responses")
    if manifest.stage not in wanted:
        raise InputError(
            wanted=f"a {' or '.join(wanted)} folder",
            got=f"a {manifest.stage} folder",
            where=str(data),
            next="--responses RESPONSES trains online, --captures CAPTURES on stored states (train.online=false)",
        )
    return manifest.stage == "responses"


def prepare(
    stage: Stage,
    target: Target,
    samples: Samples,
    manifest: Manifest,
    counts_V: Tensor,
    settings: TrainSettings,
    shape: DraftSettings,
) -> Trainer:
    """A trainer at the newest checkpoint of the stage's folder, or at its start."""
    out = stage.folder
    folder = next(reversed(step_folders(out)), None)
    if folder is not None:
        draft, info = load_checkpoint(folder, target.embedding)
    else:
        draft, info = starting_draft(target, samples, manifest, counts_V, settings, shape)
    trainable(draft)
    teacher = Teacher(target, target_ids(draft.d2t), samples.last_hidden_norm)
    batches = Batches(
        samples, teacher, steps=settings.ttt_length, loss_on=settings.loss_on, argmax_file=out / "argmax.int32"
    )
    lengths = [sample.length for sample in samples.samples]
    train_split = samples.of_split("train")
    trained_on = [train_split[index] for index in order(len(train_split), settings.epochs, settings.seed)]
    packed = pack(trained_on, lengths, settings.batch_tokens)
    plan = [packed[first : first + settings.accumulate] for first in range(0, len(packed), settings.accumulate)]
    dtype = DTYPES[stage.decided["precision"]]
    trainer = Trainer(draft, info, make_optimiser(draft, settings), teacher, batches, plan, lengths, settings, dtype)
    if folder is not None:
        trainer.step, trainer.tokens = restore(folder, draft, trainer.optimiser)
        say(f"train: resuming at step {trainer.step} of {len(plan)}")
    return trainer


def held_out(trainer: Trainer, samples: Samples) -> HeldOut | None:
    """What is measured while training; None where it is switched off or nothing is held out."""
    settings = trainer.settings
    if settings.evaluate_every == 0:
        return None
    found = HeldOut(samples, trainer.teacher, settings.ttt_length, settings.evaluate_samples)
    if not found.chosen:
        say("train: no held-out sample, so accept length is not measured and the last step is the draft")
        return None
    return found


def run(trainer: Trainer, stage: Stage, heldout: HeldOut | None) -> tuple[Path, dict[str, Any]]:
    """Every step that is left, checkpoints among them; the folder of the draft handed on, and facts about the choice.

    That draft is the step whose held-out accept length is highest, where it is measured, else the last.
    """
    out, steps, settings = stage.folder, len(trainer.plan), trainer.settings
    lines = Metrics(out, trainer.step)
    total = sum(trainer.lengths[index] for step in trainer.plan for indices in step for index in indices)

    def save() -> None:
        stage.save()  # the seconds so far
        best = lines.best
        keep = None if best is None else best["step"]
        save_step(out, trainer.draft, trainer.info, trainer.optimiser, trainer.step, trainer.tokens, keep)

    with Progress("train", total, "tokens", done=trainer.tokens) as bar, stop_requested() as stop:
        while trainer.step < steps and not lines.overtrained(settings.patience):
            before = trainer.tokens
            line = trainer.advance()
            if heldout and (trainer.step % settings.evaluate_every == 0 or trainer.step == steps):
                line |= heldout.measure(trainer.draft)
            bar.advance(trainer.tokens - before, note=note(line))
            lines.append({**line, "tokens_per_s": round(bar.rate, 1), "time": round(time.time(), 3)})
            if stop.is_set() or trainer.step % settings.save_every == 0 or lines.best is lines.lines[-1]:
                save()
            if stop.is_set() and trainer.step < steps:
                raise KeyboardInterrupt(f"stopped at step {trainer.step}; the same command resumes there")
    if not (out / f"step-{trainer.step}").is_dir():
        save()
    return chosen(out, lines, trainer.step, steps)


def chosen(out: Path, lines: Metrics, step: int, steps: int) -> tuple[Path, dict[str, Any]]:
    """The folder of the draft handed on, and why it is that one."""
    if step < steps:
        say(f"train: stopped at step {step} of {steps}: the loss falls, the held-out accept length does too")
    if lines.best is None:
        return out / f"step-{step}", {"stopped_early": False}
    best = lines.best
    say(f"train: the draft is step {best['step']}, held-out accept length {best[HELD_OUT]:.3f}")
    return out / f"step-{best['step']}", {"stopped_early": step < steps, HELD_OUT: best[HELD_OUT]}


def row_weights(batches: list[Batch], t2d: Tensor, settings: TrainSettings) -> list[float]:
    """What one row of each TTT step weighs: its step's weight over the rows of the whole optimiser step, counted over
    all its batches before anything is divided: the rows in the loss at that step (`supervised`), or all (`all`)."""
    kept = torch.stack(
        [torch.stack([rows.sum() for rows in in_vocabulary(b.rows, b.argmax_T, t2d)]) for b in batches]
    ).sum(0)
    total = sum(batch.ids_T.numel() for batch in batches)
    by = [total if settings.denominator == "all" else max(1, count) for count in kept.tolist()]
    return [weight / count for weight, count in zip(settings.weights(len(by)), by, strict=True)]


def precision(settings: TrainSettings) -> str:
    """The dtype of the matrix products; weights, sums and the optimiser are float32 always."""
    wanted = settings.precision
    return wanted if wanted != "auto" else next(name for name, dtype in DTYPES.items() if dtype == fastest_dtype(256))


def metrics(step: int, tokens: int, loss: float, sums: Sums, rate: float, norm: float) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": tokens,
        "loss": round(loss, 5),
        "loss_per_step": [round(value, 5) for value in sums.mean_loss()],
        "accuracy": [round(value, 5) for value in sums.accuracy()],
        "rows": [int(value) for value in sums.rows],
        "learning_rate": rate,
        "gradient_norm": round(norm, 4),
    }


def note(line: dict[str, Any]) -> str:
    accuracy = " ".join(f"{value:.2f}" for value in line["accuracy"])
    held = f", held-out accept length {line[HELD_OUT]:.3f}" if HELD_OUT in line else ""
    return f"step {line['step']}, loss {line['loss']:.3f}, accuracy {accuracy}{held}"


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that the step in work is finished and saved; the second interrupts."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        say("train: finishing this step and saving it")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
