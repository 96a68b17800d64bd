"""`eyas train`: captures in, a draft out.

The run is planned from sample lengths alone (which samples in which step), so a checkpoint's step number is the whole
cursor: a run that was killed goes on to the same weights, bit for bit on a CPU. Several processes (distributed.py)
share each step's samples and take the steps that one would.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.data.captures import chosen_precision
from eyas.data.shards import Samples
from eyas.errors import InputError
from eyas.models.checkpoint import DraftInfo
from eyas.models.draft import Draft
from eyas.models.target import DTYPES, Target, load_target, outline_target
from eyas.models.vocab import coverage, draft_ids, target_ids
from eyas.progress import Progress, say
from eyas.recipe import CaptureSettings, DraftSettings, TargetSettings, TrainSettings, recorded_training
from eyas.run import JSON, Manifest, hash_file, read_manifest
from eyas.shipped import draft_folder
from eyas.stage import Stage
from eyas.training.batches import Ahead, Batches, check_shares, parts, planned
from eyas.training.distributed import Ranks, joined, stop_requested
from eyas.training.foresee import check_start, data_is_online
from eyas.training.heldout import HeldOut
from eyas.training.initialise import count_tokens
from eyas.training.inputs import check_captures
from eyas.training.least_squares import start_from_least_squares
from eyas.training.loss import Batch, Sums, in_vocabulary, ttt_loss
from eyas.training.metrics import EVENTS, HELD_OUT, METRICS, Metrics, metrics, note
from eyas.training.objectives import Objective, objective_of
from eyas.training.optimise import Optimiser, learning_rate, make_optimiser, trained
from eyas.training.replicas import Replicas
from eyas.training.shards import local, whole_tensor
from eyas.training.start import (
    checksums,
    from_least_squares,
    open_samples,
    opened,
    precision,
    say_start,
    starting_draft,
    trainable,
)
from eyas.training.teacher import Teacher
from eyas.training.trainer_state import load_checkpoint, restore, save_step, step_folders


@dataclass
class Trainer:
    """One run: what is trained, on what, and how far it is."""

    draft: Draft
    info: DraftInfo
    teacher: Teacher
    batches: Batches
    plan: list[list[list[int]]]
    """Optimiser steps, each of packed batches, each of sample indices."""
    lengths: list[int]
    settings: TrainSettings
    dtype: torch.dtype
    ranks: Ranks = field(default_factory=Ranks)
    unit_A: Tensor | None = None
    step: int = 0
    tokens: int = 0
    draft_of_V: Tensor = field(init=False)
    objective: Objective = field(init=False)
    replicas: Replicas = field(init=False)
    optimiser: Optimiser = field(init=False)
    ahead: Ahead = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.draft_of_V = draft_ids(self.draft.t2d)
        self.objective = objective_of(settings)
        self.replicas = Replicas(self.draft, self.compute, settings.ttt_length, self.ranks, settings.parallel)
        self.ahead = Ahead(self.read, len(self.plan))
        # of the parameters as they are held now: whole or in shards
        self.optimiser = make_optimiser(self.draft, settings, self.unit_A, self.dtype, self.ranks)

    def advance(self) -> dict[str, Any]:
        """One optimiser step; its line of metrics. Raises InputError where the loss is not finite."""
        settings, mine = self.settings, self.mine(self.step)
        read = self.read(self.step) if settings.online else self.ahead.take(self.step)
        batches = [batch.to(self.ranks.device) for batch in read]
        weights = row_weights(batches, self.draft.t2d, settings, self.ranks)
        rate = learning_rate(self.step, len(self.plan), settings)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        losses, sums = [], Sums.none(settings.ttt_length)
        for place in range(len(mine)):
            batch = batches[place] if place < len(batches) else None
            with self.replicas.sending(last=place == len(mine) - 1):
                loss, added = self.loss(batch, weights)
                loss.backward()
            losses.append(loss.item())
            sums += added
        total, sums = self.summed(sum(losses), sums)
        if not math.isfinite(total):
            suspects = [batch for batch, loss in zip(batches, losses, strict=False) if not math.isfinite(loss)]
            raise self.not_finite("loss", total, suspects, weights)
        self.optimiser.gradient_in_units()
        norm = self.clip()
        if not math.isfinite(norm):
            raise self.not_finite("gradient norm", norm, batches, weights)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        tokens = sum(self.lengths[index] for indices in self.plan[self.step - 1] for index in indices)
        self.tokens += tokens
        return metrics(self.step, self.tokens, total, sums, rate, norm)

    def mine(self, step: int) -> list[list[int]]:
        """This process's packed batches of a step, the last of them maybe without a sample."""
        return parts(self.plan[step], self.lengths, self.settings.batch_tokens, self.ranks.size)[self.ranks.place.rank]

    def read(self, step: int) -> list[Batch]:
        return [self.batches.load(indices) for indices in self.mine(step) if indices]

    def loss(self, batch: Batch | None, weights: list[float]) -> tuple[Tensor, Sums]:
        """Of one of this process's batches; of none where the others have one batch more."""
        return self.replicas(batch, weights)

    def compute(self, batch: Batch, weights: Sequence[float]) -> tuple[Tensor, Sums]:
        named = {"dtype": self.dtype, "objective": self.objective, "on_policy": self.settings.on_policy}
        return ttt_loss(self.draft, batch, self.teacher, self.draft_of_V, weights, **named)

    def summed(self, loss: float, sums: Sums) -> tuple[float, Sums]:
        """Over all processes."""
        here = [torch.full_like(sums.loss, loss), sums.loss, sums.hits, sums.kept, sums.rows]
        summed = self.ranks.sum(torch.stack(here))
        return summed[0, 0].item(), Sums(*summed[1:])

    def clip(self) -> float:
        """Clip the gradient, unless the limit is 0; its norm before."""
        parameters, most = list(trained(self.draft).values()), self.settings.clip_norm or math.inf
        return whole_tensor(torch.nn.utils.clip_grad_norm_(parameters, most)).item()

    def not_finite(self, what: str, value: float, batches: list[Batch], weights: list[float]) -> InputError:
        """Which samples it was: those whose states are not finite, else those that do it alone, else all of them."""
        names = [name for batch in batches for name in batch.samples]
        bad = self.everyones([name for batch in batches for name in batch.with_bad_states()])
        with self.replicas.whole():
            alone = [] if bad else self.bad_alone(names, weights)
        named = bad or self.everyones(alone) or self.everyones(names)
        return InputError(
            wanted=f"a finite {what} at step {self.step + 1}",
            got=f"{value}; {'states that are not finite in' if bad else 'samples'}: {', '.join(named)}",
            where="captures" if bad else "train",
            next="capture those samples again" if bad else CALMER,
        )

    def check_weights(self) -> None:
        """Raise InputError, everywhere, where an update left weights that are not finite: before they are kept."""
        held = {name: local(parameter) for name, parameter in trained(self.draft).items()}
        bad = self.everyones([name for name, weights in held.items() if not bool(weights.isfinite().all())])
        if bad:
            raise InputError(
                wanted=f"finite weights after step {self.step}",
                got=f"NaN or infinity in {', '.join(sorted(set(bad)))}",
                where="train",
                next=CALMER,
            )

    def everyones(self, names: list[str]) -> list[str]:
        return [name for some in self.ranks.gather(names) for name in some]

    def bad_alone(self, names: list[str], weights: list[float]) -> list[str]:
        """Of these samples of the step at work, those whose own loss or gradient is not finite."""
        entries = self.batches.reader.samples
        indices = [index for indices in self.plan[self.step] for index in indices if entries[index].id in names]
        found = []
        for index in indices:
            loss, _ = self.loss(self.batches.load([index]).to(self.ranks.device), weights)
            gradients = torch.autograd.grad(loss, list(trained(self.draft).values()))
            if not all(bool(value.isfinite().all()) for value in (loss, *gradients)):
                found.append(entries[index].id)
        return found


CALMER = "--set train.learning_rate lower; where a step-N is kept, --set train.start_from to it, and another --out"
"""Against what grew beyond all bounds: a run goes on with the settings it began with, so not in its own folder."""


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
    disk. Under torchrun every process calls it with the same arguments, and gets the manifest; RankLost where one of
    them ends before the others.
    """
    settings, shape, named = settings or TrainSettings(), draft or DraftSettings(), target or TargetSettings()
    with joined(settings) as ranks:
        return train_among(ranks, data, out, settings, shape, named, capture or CaptureSettings())


def train_among(
    ranks: Ranks,
    data: Path,
    out: Path,
    settings: TrainSettings,
    shape: DraftSettings,
    named: TargetSettings,
    capture: CaptureSettings,
) -> Manifest:
    """`train`, by one of several processes: the first writes what they all compute."""
    manifest = read_manifest(data)
    online = data_is_online(manifest, settings, data)
    settings = settings.model_copy(update={"online": online})
    kept = recorded_training(settings, shape, named, capture if online else None)
    if not step_folders(out):  # what a run that goes on began from may be gone by now
        outline = outline_target(named.name, trust_remote_code=named.trust_remote_code)
        check_start(settings, shape, manifest, capture, outline, data)
    stage = opened(ranks, data, manifest.stage, out, kept, settings)
    if settings.start_from is not None and ranks.leads:
        say_start(stage, draft_folder(settings.start_from))
    if stage.complete is not None:
        return stage.complete
    if ranks.leads and "precision" not in stage.decided:  # a resume computes as the run began, whatever is faster today
        online_precision = {"capture_precision": chosen_precision(capture)} if online else {}
        stage.save(precision=precision(settings, ranks.device), **online_precision)
    stage.decided = ranks.share(stage.decided)
    loaded = load_target(named.name, trust_remote_code=named.trust_remote_code).to(ranks.device)
    samples = open_samples(data, manifest, loaded, named, capture, stage)
    check_captures(manifest, samples, loaded, where=data)
    chosen = samples.of_split("train")
    counts_V = count_tokens(samples, chosen, settings.loss_on, loaded.vocab_size)
    trainer = prepare(ranks, stage, loaded, samples, manifest, counts_V, settings, shape)
    step, measured = run(trainer, stage, held_out(trainer, samples))
    made = finished(trainer, stage, loaded, step, counts_V, measured) if ranks.leads else manifest
    return ranks.share(made)


def finished(trainer: Trainer, stage: Stage, target: Target, step: Path, counts_V: Tensor, measured: JSON) -> Manifest:
    """Declare the stage's folder complete: `step` is the draft that it hands on."""
    out = stage.folder
    facts = {
        "draft": step.name,
        "target": target.identity.model_dump(mode="json"),
        "tokenizer_hash": target.tokenizer_hash,
        "template_hash": target.template_hash,
        "vocabulary_coverage": round(coverage(counts_V, trainer.draft.t2d.cpu()), 6),
        "tokens": trainer.tokens,
        "steps": trainer.step,
        "precision": stage.decided["precision"],
        "processes": trainer.ranks.size,
        **({"start": stage.decided["start"]} if "start" in stage.decided else {}),
        **measured,
    }
    paths = (*sorted(path for path in step.rglob("*") if path.is_file()), out / METRICS, out / EVENTS)
    files = {str(path.relative_to(out)): hash_file(path) for path in paths}
    return stage.finish(files=files, facts=facts)


def prepare(
    ranks: Ranks,
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
    folder = ranks.share(next(reversed(step_folders(out)), None))
    if folder is not None:
        draft, info = load_checkpoint(folder, target.embedding)
        draft.to(ranks.device)
    else:
        draft, info = starting_draft(target, samples, manifest, counts_V, settings, shape)
        if settings.start_from is not None and ranks.leads:  # what it goes on from may be replaced by what it makes
            stage.save(start=checksums(draft_folder(settings.start_from)))
    teacher = Teacher(target, target_ids(draft.d2t), samples.last_hidden_norm)
    train_split = samples.of_split("train")
    unit_A = None
    if from_least_squares(settings, draft):
        resumed = torch.ones(draft.fc.in_features, device=ranks.device)  # the checkpoint's are read into it
        fresh = folder is None
        unit_A = start_from_least_squares(draft, teacher, samples, train_split, settings.seed) if fresh else resumed
    trainable(draft, settings.head)
    if ranks.place.local_rank:
        ranks.wait()  # the first process of this machine makes the file that all of it share
    argmax_file = out / ("argmax.int32" if ranks.place.machine == 0 else f"argmax-{ranks.place.machine}.int32")
    batches = Batches(samples, teacher, steps=settings.ttt_length, loss_on=settings.loss_on, argmax_file=argmax_file)
    if not ranks.place.local_rank:
        ranks.wait()
    lengths, plan = [sample.length for sample in samples.samples], planned(samples, settings)
    check_shares(plan, settings, ranks)
    dtype = DTYPES[stage.decided["precision"]]
    trainer = Trainer(draft, info, teacher, batches, plan, lengths, settings, dtype, ranks, unit_A)
    if folder is not None:
        trainer.step, trainer.tokens = restore(folder, draft, trainer.optimiser, ranks)
        say(f"train: resuming at step {trainer.step} of {len(plan)}")
    return trainer


def held_out(trainer: Trainer, samples: Samples) -> HeldOut | None:
    """What is measured while training; None where it is switched off or nothing is held out."""
    settings = trainer.settings
    if settings.evaluate_every == 0:
        return None
    found = HeldOut(samples, trainer.teacher, settings.ttt_length, settings.evaluate_samples, trainer.ranks)
    if not found.chosen:
        say("train: no held-out sample to measure, so accept length is not measured and the last step is the draft")
        return None
    return found


def run(trainer: Trainer, stage: Stage, heldout: HeldOut | None) -> tuple[Path, dict[str, Any]]:
    """Every step that is left, checkpoints among them; the folder of the draft handed on, and facts about the choice.

    That draft is the step whose held-out accept length is highest, where it is measured, else the last.
    """
    out, steps, settings, ranks = stage.folder, len(trainer.plan), trainer.settings, trainer.ranks
    lines = Metrics(out, trainer.step, writes=ranks.leads)
    total = sum(trainer.lengths[index] for step in trainer.plan for indices in step for index in indices)

    def save() -> None:
        trainer.check_weights()
        if ranks.leads:
            stage.save()  # the seconds so far
        best = lines.best
        keep = None if best is None else best["step"]
        save_step(out, trainer.draft, trainer.info, trainer.optimiser, trainer.step, trainer.tokens, keep, ranks)

    with Progress("train", total, "tokens", done=trainer.tokens) as bar, stop_requested(ranks) as stop:
        while trainer.step < steps and not lines.overtrained(settings.patience):
            before = trainer.tokens
            line = trainer.advance()
            if heldout and (trainer.step % settings.evaluate_every == 0 or trainer.step == steps):
                with trainer.replicas.whole():
                    line |= heldout.measure(trainer.draft)
            bar.advance(trainer.tokens - before, note=note(line))
            lines.append({**line, "tokens_per_s": round(bar.rate, 1), "time": round(time.time(), 3)})
            stopping = ranks.any(stop.is_set())
            if stopping or trainer.step % settings.save_every == 0 or lines.best is lines.lines[-1]:
                save()
            if stopping and trainer.step < steps:
                raise KeyboardInterrupt(f"stopped at step {trainer.step}; the same command resumes there")
    if ranks.share(not (out / f"step-{trainer.step}").is_dir()):
        save()
    return chosen(out, lines, trainer.step, steps)


def chosen(out: Path, lines: Metrics, step: int, steps: int) -> tuple[Path, dict[str, Any]]:
    """The folder of the draft handed on, and why it is that one."""
    if step < steps:
        say(f"train: stopped at step {step} of {steps}: the loss falls, the held-out accept length does too")
    if lines.best is None:
        return out / f"step-{step}", {"stopped_early": step < steps}
    best = lines.best
    say(f"train: the draft is step {best['step']}, held-out accept length {best[HELD_OUT]:.3f}")
    return out / f"step-{best['step']}", {"stopped_early": step < steps, HELD_OUT: best[HELD_OUT]}


def row_weights(batches: list[Batch], t2d: Tensor, settings: TrainSettings, ranks: Ranks | None = None) -> list[float]:
    """What one row of each TTT step weighs: its step's weight over the rows of the whole optimiser step, counted over
    all its batches and processes before anything is divided: the rows in the loss at that step (`supervised`), or all
    (`all`)."""
    counts = torch.zeros(settings.ttt_length + 1, dtype=torch.int64)
    for batch in batches:
        kept = [rows.sum() for rows in in_vocabulary(batch.rows, batch.argmax_T, t2d)]
        counts += torch.stack([*kept, torch.tensor(batch.ids_T.numel(), device=kept[0].device)]).cpu()
    *kept_rows, total = (ranks or Ranks()).sum(counts).tolist()
    by = [total if settings.denominator == "all" else max(1, count) for count in kept_rows]
    return [weight / count for weight, count in zip(settings.weights(len(by)), by, strict=True)]
