"""Training: resumes to the same bits, stops by name, refuses what is not its own, and learns."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem

from eyas.data.shards import CaptureReader
from eyas.errors import InputError
from eyas.models.checkpoint import draft_tensors, load_draft
from eyas.models.draft import make_draft
from eyas.models.target import Target, load_target, outline_target
from eyas.recipe import CaptureSettings, DraftSettings, EvaluateSettings, TargetSettings, TrainSettings
from eyas.run import Manifest, is_complete, read_manifest
from eyas.training import loop, trainer_state
from eyas.training.batches import Ahead, order, pack
from eyas.training.evaluate import evaluate
from eyas.training.foresee import foreseen
from eyas.training.initialise import draft_config, expected_counts, gain, new_draft
from eyas.training.inputs import check_maker
from eyas.training.loop import train
from eyas.training.loss import Batch, Sums
from eyas.training.optimise import learning_rate
from eyas.training.teacher import Teacher
from made_captures import BOUNDARIES, made, make_samples, poisoned, write_captures
from wiring_lab import write_draft

SHAPE, WHOLE = DraftSettings(vocab_size=128), DraftSettings(vocab_size=259)
STATES_FILE = "trainer_state/shard-00001-model-00001-of-00001.safetensors"
SETTINGS = TrainSettings(epochs=4, batch_tokens=64, ttt_length=3, save_every=3, precision="float32")
REFUSED = [
    (SETTINGS.model_copy(update={"seed": 1}), SHAPE, "train.seed = 1"),
    (SETTINGS, WHOLE, "draft.vocab_size = 259"),
]


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return made(tmp_path_factory.mktemp("captures") / "captures", tiny_target)[0]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture
def run(tiny_target: Path) -> Callable[..., Manifest]:
    def call(captures: Path, out: Path, settings: TrainSettings = SETTINGS, shape: DraftSettings = SHAPE) -> Manifest:
        return train(captures, out, settings, shape, TargetSettings(name=str(tiny_target)))

    return call


@pytest.fixture
def foresee(tiny_target: Path) -> Callable[..., dict]:
    def call(data: Path, out: Path, settings: TrainSettings = SETTINGS, shape: DraftSettings = SHAPE) -> dict:
        target = TargetSettings(name=str(tiny_target))
        return foreseen(data, out, settings, shape, target, CaptureSettings(), online=False)

    return call


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, act: Callable[[], None]) -> None:
    """Call `act` in the middle of optimiser step `steps` + 1."""
    advance = loop.Trainer.advance

    def stopping(trainer: loop.Trainer) -> dict:
        if trainer.step == steps:
            act()
        return advance(trainer)

    monkeypatch.setattr(loop.Trainer, "advance", stopping)


def kill() -> None:
    raise RuntimeError("killed")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return draft_tensors(load_draft(out)[0])


def test_a_limit_of_zero_clips_nothing_and_tells_the_norm(
    captures: Path, tmp_path: Path, run: Callable[..., Manifest]
) -> None:
    norms = {}
    for limit in (0.0, 1e9, 1e-3):
        settings = SETTINGS.model_copy(update={"epochs": 0.5, "evaluate_every": 0, "clip_norm": limit})
        made = run(captures, tmp_path / str(limit), settings)
        assert run(captures, tmp_path / str(limit), settings) == made
        lines = (tmp_path / str(limit) / "metrics.jsonl").read_text().splitlines()
        norms[limit] = [json.loads(line)["gradient_norm"] for line in lines]
    assert norms[0.0] == norms[1e9] != norms[1e-3] and min(norms[0.0]) > 1e-3


def test_what_a_run_comes_to_is_known_before_it(
    captures: Path, tmp_path: Path, run: Callable[..., Manifest], foresee: Callable[..., dict]
) -> None:
    settings = SETTINGS.model_copy(update={"epochs": 1.5, "accumulate": 2, "evaluate_every": 0})
    told = foresee(captures, tmp_path / "draft", settings)
    assert not (tmp_path / "draft").exists()
    made = run(captures, tmp_path / "draft", settings)
    extent = {"samples": 10, "tokens": made.facts["tokens"], "steps": made.facts["steps"]}
    assert told == {"state": "new", "run": extent}
    assert foresee(captures, tmp_path / "draft", settings) == {"state": "complete", "run": extent}


def test_the_plan_of_a_run_that_was_cut_says_how_far_it_is_and_refuses_what_the_run_would(
    captures: Path,
    tmp_path: Path,
    run: Callable[..., Manifest],
    foresee: Callable[..., dict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 5, kill)
        with pytest.raises(RuntimeError, match="killed"):
            run(captures, tmp_path / "cut")
    told = foresee(captures, tmp_path / "cut")
    assert (told["state"], told["step"], told["run"]["steps"] > 5) == ("unfinished", 3, True)
    for settings, shape, part in REFUSED:
        for ask in (foresee, run):
            with pytest.raises(InputError) as caught:
                ask(captures, tmp_path / "cut", settings, shape)
            assert caught.value.wanted == part


def test_what_a_run_is_refused_for_by_its_start_is_in_its_plan_and_leaves_no_folder(
    captures: Path, tmp_path: Path, target: Target, run: Callable[..., Manifest], foresee: Callable[..., dict]
) -> None:
    taps, same = (
        str(write_draft(tmp_path / name, make_draft(draft_config(target, boundaries, SHAPE)), target))
        for name, boundaries in (("taps", (1, 3, 4)), ("same", BOUNDARIES))
    )
    cut = shutil.copytree(same, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    parallel = DraftSettings(method="peagle", vocab_size=128)
    refused = [
        ({"on_policy": True}, parallel, "peagle, of draft.method"),
        ({}, DraftSettings(kv_lora_rank=16), "draft.block = llama and kv_lora_rank"),
        ({}, DraftSettings(method="peagle", mask_token_id=10**6), "mask_token_id 1000000"),
        ({"start_from": str(tmp_path / "nowhere")}, SHAPE, "no such folder"),
        ({"start_from": taps}, DraftSettings(), f"captures of {list(BOUNDARIES)}"),
        ({"start_from": same}, DraftSettings(block="qwen3"), "draft.block = 'qwen3'"),
        ({"start_from": str(cut.parent)}, SHAPE, str(cut)),
    ]
    for updates, shape, part in refused:
        settings = SETTINGS.model_copy(update=updates)
        for ask in (foresee, run):
            with pytest.raises(InputError) as caught:
                ask(captures, tmp_path / "out", settings, shape)
            assert part in " ".join(caught.value.as_json().values()), part
        assert not (tmp_path / "out").exists()


def test_a_plan_for_a_gpu_on_a_machine_without_one_says_so(
    captures: Path, tmp_path: Path, foresee: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = foresee(captures, tmp_path / "out", SETTINGS.model_copy(update={"device": "cuda"}))
    assert told["notes"] == ["train.device = cuda, and this machine has no GPU: the run is refused here"]


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"tokenizer_hash": "other"}, "tokenizer_mismatch"),
        ({"template_hash": "other"}, "template_mismatch"),
        ({"num_hidden_layers": 99}, "target_revision"),
    ],
)
def test_an_outline_tells_captures_of_another_target_but_for_its_weights(
    captures: Path, tiny_target: Path, changed: dict, code: str
) -> None:
    manifest, outline = read_manifest(captures), outline_target(str(tiny_target))
    assert outline.identity.weights_hash == ""
    check_maker(manifest, outline, captures)
    facts = manifest.facts | changed
    facts["target"] = facts["target"] | {key: value for key, value in changed.items() if key in facts["target"]}
    with pytest.raises(InputError) as caught:
        check_maker(manifest.model_copy(update={"facts": facts}), outline, captures)
    assert caught.value.code == code


@pytest.mark.parametrize("seed", [2**43, -(2**43)])
def test_the_largest_seeds_give_an_order(seed: int) -> None:
    assert sorted(order(5, 1.0, seed)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("updates", [{}, {"accumulate": 2}, {"head": "trained"}], ids=["plain", "accumulated", "head"])
def test_a_killed_run_resumes_to_the_same_weights_bit_for_bit(
    captures: Path, tmp_path: Path, run: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch, updates: dict
) -> None:
    settings = SETTINGS.model_copy(update=updates)
    whole = run(captures, tmp_path / "whole", settings)
    with monkeypatch.context() as patch:
        stop_after(patch, 5, kill)
        with pytest.raises(RuntimeError, match="killed"):
            run(captures, tmp_path / "cut", settings)
    assert [folder.name for folder in trainer_state.step_folders(tmp_path / "cut")] == ["step-3"]
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a line cut by the kill
    resumed = run(captures, tmp_path / "cut", settings)
    assert whole.facts["draft"] == resumed.facts["draft"]
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    ]
    assert [line["step"] for line in lines[1]] == list(range(1, len(lines[0]) + 1))
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]


def test_a_frozen_head_alone_stays_as_it_began(captures: Path, tmp_path: Path, run: Callable[..., Manifest]) -> None:
    settings = SETTINGS.model_copy(update={"head": "frozen", "evaluate_every": 0, "epochs": 0.5})
    still = settings.model_copy(update={"learning_rate": 1e-30})  # what a run begins with
    run(captures, tmp_path / "before", still)
    run(captures, tmp_path / "after", settings)
    before, after = weights(tmp_path / "before"), weights(tmp_path / "after")
    alike = [name for name in after if torch.equal(before[name], after[name])]
    assert sorted(alike) == ["d2t", "lm_head.weight", "t2d"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_finishes_the_step_and_leaves_a_resumable_folder(
    captures: Path,
    tmp_path: Path,
    run: Callable[..., Manifest],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 4, lambda: os.kill(os.getpid(), number))
        with pytest.raises(KeyboardInterrupt):
            run(captures, tmp_path / "draft")
    assert [folder.name for folder in trainer_state.step_folders(tmp_path / "draft")] == ["step-3", "step-5"]
    assert not (tmp_path / "draft" / "manifest.json").exists()
    assert run(captures, tmp_path / "draft").facts["steps"] > 5


def test_only_the_last_two_checkpoints_are_kept_and_the_manifest_names_the_newest(
    captures: Path, tmp_path: Path, run: Callable[..., Manifest]
) -> None:
    manifest = run(captures, tmp_path / "draft")
    folders = trainer_state.step_folders(tmp_path / "draft")
    assert len(folders) == 2 and folders[-1].name == manifest.facts["draft"]
    assert manifest == read_manifest(tmp_path / "draft", "draft")
    assert run(captures, tmp_path / "draft") == manifest, "done: nothing is computed again"
    assert manifest.facts["vocabulary_coverage"] > 0.5
    names = {path.name for path in folders[-1].iterdir()}
    assert names == {"config.json", "model.safetensors", "trainer_state", "trainer.json"}


def test_other_settings_or_captures_do_not_resume(
    captures: Path, tmp_path: Path, tiny_target: Path, run: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 4, kill)
        with pytest.raises(RuntimeError):
            run(captures, tmp_path / "draft")
    with pytest.raises(InputError, match="learning_rate"):
        run(captures, tmp_path / "draft", SETTINGS.model_copy(update={"learning_rate": 0.5}))
    with pytest.raises(InputError, match="fc_norm"):
        run(captures, tmp_path / "draft", shape=SHAPE.model_copy(update={"fc_norm": False}))
    other, _ = made(tmp_path / "other", tiny_target, train=3)
    with pytest.raises(InputError, match="captures"):
        run(other, tmp_path / "draft")


def test_a_loss_that_is_not_finite_names_the_samples_and_keeps_the_checkpoint(
    tmp_path: Path, target: Target, run: Callable[..., Manifest]
) -> None:
    """A start that reads no states: the first step that reads them tells."""
    samples = make_samples(target, train=6, heldout=0)
    folder = write_captures(tmp_path / "captures", target, [*samples[:4], poisoned(samples[4]), samples[5]])
    settings = SETTINGS.model_copy(update={"save_every": 1, "batch_tokens": 32, "seed": 1, "initialise": "target"})
    with pytest.raises(InputError) as caught:
        run(folder, tmp_path / "draft", settings, WHOLE)
    assert caught.value.got == "nan; states that are not finite in: sample-4"
    assert caught.value.wanted.startswith("a finite loss at step ")
    for kept in trainer_state.step_folders(tmp_path / "draft"):
        assert all(tensor.isfinite().all() for tensor in draft_tensors(load_draft(kept)[0]).values())


def test_weights_that_are_not_finite_are_never_kept(
    captures: Path, tmp_path: Path, run: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last update of all has no loss after it that could tell."""
    settings = SETTINGS.model_copy(update={"learning_rate": 3e38, "epochs": 1e-9})
    with pytest.raises(InputError, match="finite weights after step 1") as caught:
        run(captures, tmp_path / "draft", settings)
    assert "norm.weight" in caught.value.got and "learning_rate lower" in caught.value.next
    assert not trainer_state.step_folders(tmp_path / "draft") and not is_complete(tmp_path / "draft")


@pytest.mark.parametrize(
    ("shape", "initialise"),
    [(WHOLE, "least_squares"), (SHAPE, "target"), (DraftSettings(vocab_size=128, block="mla"), "least_squares")],
)
@pytest.mark.parametrize("name", ["taps_TA", "last_hidden_TH"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_start_from_states_that_are_not_finite_names_the_sample(
    tmp_path: Path,
    target: Target,
    run: Callable[..., Manifest],
    shape: DraftSettings,
    initialise: str,
    name: str,
    value: float,
) -> None:
    samples = make_samples(target, train=6, heldout=0)
    bad = poisoned(samples[4], name, value)
    folder = write_captures(tmp_path / "captures", target, [*samples[:4], bad, samples[5]])
    with pytest.raises(InputError) as caught:
        run(folder, tmp_path / "draft", SETTINGS.model_copy(update={"initialise": initialise}), shape)
    assert caught.value.got == "states that are not finite in: sample-4"
    assert trainer_state.step_folders(tmp_path / "draft") == []


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("where", ["loss", "gradient norm"])
def test_a_sample_that_overflows_by_itself_is_named_alone(
    captures: Path,
    tmp_path: Path,
    run: Callable[..., Manifest],
    monkeypatch: pytest.MonkeyPatch,
    accumulate: int,
    where: str,
) -> None:
    """Its states are finite: only its own loss, or its own gradient, tells."""
    whole = loop.Trainer.loss

    def overflowing(trainer: loop.Trainer, batch: Batch, weights: list[float]) -> tuple[torch.Tensor, Sums]:
        loss, sums = whole(trainer, batch, weights)
        if "sample-2" in batch.samples and trainer.step >= 3:
            if where == "gradient norm":
                loss.register_hook(lambda gradient: gradient * float("inf"))
                return loss * 1.0, sums
            loss = loss * float("nan")
        return loss, sums

    monkeypatch.setattr(loop.Trainer, "loss", overflowing)
    settings = SETTINGS.model_copy(update={"save_every": 1, "batch_tokens": 48, "accumulate": accumulate, "epochs": 9})
    with pytest.raises(InputError) as caught:
        run(captures, tmp_path / "draft", settings)
    assert where in caught.value.wanted and caught.value.got.endswith("; samples: sample-2")
    kept = trainer_state.step_folders(tmp_path / "draft")
    assert len(kept) == 2
    for folder in kept:
        assert all(tensor.isfinite().all() for tensor in draft_tensors(load_draft(folder)[0]).values())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", STATES_FILE, "trainer.json"])
def test_a_checkpoint_cut_short_is_named_and_the_one_before_goes_on(
    captures: Path, tmp_path: Path, run: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 7, kill)
        with pytest.raises(RuntimeError, match="killed"):
            run(captures, tmp_path / "draft")
    cut = tmp_path / "draft" / "step-6"
    (cut / name).write_bytes((cut / name).read_bytes()[:20])
    with pytest.raises(InputError) as caught:
        run(captures, tmp_path / "draft")
    assert caught.value.wanted == "a whole checkpoint" and f"remove {cut} " in caught.value.next
    assert name in caught.value.where
    shutil.rmtree(cut)
    assert run(captures, tmp_path / "draft").facts["steps"] > 7


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", STATES_FILE])
def test_a_changed_byte_in_a_checkpoint_is_named_and_without_checksums_it_still_resumes(
    captures: Path, tmp_path: Path, run: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Checkpoints of before hold sizes alone."""
    with monkeypatch.context() as patch:
        stop_after(patch, 7, kill)
        with pytest.raises(RuntimeError, match="killed"):
            run(captures, tmp_path / "draft")
    step = tmp_path / "draft" / "step-6"
    damaged = bytearray((step / name).read_bytes())
    if name == "config.json":
        damaged[-1:] = b" "  # still JSON, of the same length
    else:
        damaged[len(damaged) // 2] ^= 1
    (step / name).write_bytes(damaged)
    with pytest.raises(InputError) as caught:
        run(captures, tmp_path / "draft")
    assert caught.value.wanted == "a whole checkpoint" and caught.value.got == "other bytes than its checksum says"
    assert caught.value.where == str(step / name) and f"remove {step} " in caught.value.next
    done = json.loads((step / "trainer.json").read_text())
    assert sorted(done.pop("sha256")) == ["config.json", "model.safetensors", STATES_FILE]
    (step / "trainer.json").write_text(json.dumps(done))
    assert run(captures, tmp_path / "draft").facts["steps"] > 7


def test_a_step_without_a_supervised_row_moves_nothing_it_should_not(
    tmp_path: Path, target: Target, run: Callable[..., Manifest]
) -> None:
    """An answer of one token gives no row: the step's loss is 0 and finite."""
    samples = make_samples(target, train=3, heldout=0)
    alone = torch.arange(len(samples[1].ids_T)) == len(samples[1].ids_T) - 1
    folder = write_captures(
        tmp_path / "captures", target, [samples[0], replace(samples[1], loss_mask_T=alone), samples[2]]
    )
    run(folder, tmp_path / "draft", SETTINGS.model_copy(update={"batch_tokens": 1, "epochs": 1}))
    lines = [json.loads(line) for line in (tmp_path / "draft" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(line["rows"][0] for line in lines)[0] == 0 and all(line["loss"] >= 0 for line in lines)


def test_a_full_disk_is_said_and_the_last_checkpoint_stays_whole(
    captures: Path, tmp_path: Path, run: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = dcp_filesystem.FileSystem.create_stream

    def full(files: Any, path: str | os.PathLike, mode: str) -> Any:
        if "step-6" in str(path) and mode == "wb":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(files, path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(dcp_filesystem.FileSystem, "create_stream", full)
        with pytest.raises(InputError, match="No space left"):
            run(captures, tmp_path / "draft")
    assert [path.name for path in sorted(tmp_path.glob("draft/*step-*"))] == ["step-3"]
    assert run(captures, tmp_path / "draft").facts["steps"] > 6


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"tokenizer_hash": "other"}, "tokenizer_hash"),
        ({"template_hash": "other"}, "template_hash"),
        ({"boundaries": [2, 4]}, "shard-00000"),
    ],
)
def test_captures_of_another_make_are_refused_by_the_fields_name(
    tmp_path: Path, target: Target, run: Callable[..., Manifest], facts: dict[str, object], words: str
) -> None:
    folder = write_captures(tmp_path / "captures", target, make_samples(target, 2, 0), **facts)
    with pytest.raises(InputError, match=words):
        run(folder, tmp_path / "draft")


@pytest.mark.parametrize("field", ["weights_hash", "hidden_size", "vocab_size", "num_hidden_layers"])
def test_captures_of_another_target_are_refused_by_the_fields_name(
    tmp_path: Path, target: Target, run: Callable[..., Manifest], field: str
) -> None:
    other = {**target.identity.model_dump(), field: "other" if field == "weights_hash" else 9}
    samples = make_samples(target, 1, 0)
    if field == "hidden_size":
        samples = [replace(samples[0], taps_TA=samples[0].taps_TA[:, :27], last_hidden_TH=samples[0].taps_TA[:, :9])]
    folder = write_captures(tmp_path / "captures", target, samples, target=other)
    with pytest.raises(InputError, match=field):
        run(folder, tmp_path / "draft")


def test_an_empty_mask_is_refused_unless_all_tokens_are_trained_on(
    tmp_path: Path, target: Target, run: Callable[..., Manifest]
) -> None:
    samples = [replace(one, loss_mask_T=torch.zeros_like(one.loss_mask_T)) for one in make_samples(target, 3, 0)]
    folder = write_captures(tmp_path / "captures", target, samples)
    with pytest.raises(InputError, match="empty loss mask"):
        run(folder, tmp_path / "draft")
    settings = SETTINGS.model_copy(update={"loss_on": "all", "epochs": 1})
    assert run(folder, tmp_path / "all", settings).facts["tokens"] == sum(len(one.ids_T) for one in samples)
    assert (tmp_path / "all" / "argmax.int32").stat().st_size == 4 * sum(len(one.ids_T) for one in samples)


def test_a_mask_without_a_row_to_supervise_is_refused(
    tmp_path: Path, target: Target, run: Callable[..., Manifest]
) -> None:
    """Every answer of one token: a row needs the two tokens after it."""
    samples = [
        replace(one, loss_mask_T=torch.arange(len(one.ids_T)) == len(one.ids_T) - 1)
        for one in make_samples(target, 3, 0)
    ]
    folder = write_captures(tmp_path / "captures", target, samples)
    with pytest.raises(InputError, match="no train sample with two supervised tokens in a row") as caught:
        run(folder, tmp_path / "draft")
    assert caught.value.code == "mask_empty"
    first = make_samples(target, 1, 0)[0]
    two = replace(first, loss_mask_T=torch.arange(len(first.ids_T)) >= len(first.ids_T) - 2)
    folder = write_captures(tmp_path / "two", target, [two, *samples[1:]])
    assert run(folder, tmp_path / "learns").facts["steps"] > 0


def test_held_out_samples_are_never_trained_on(captures: Path, tmp_path: Path, run: Callable[..., Manifest]) -> None:
    train_tokens = sum(entry.length for entry in CaptureReader(captures).samples if entry.split == "train")
    settings = SETTINGS.model_copy(update={"epochs": 1})
    assert run(captures, tmp_path / "draft", settings).facts["tokens"] == train_tokens


@pytest.mark.parametrize("initialise", ["target", "random"])
def test_one_sample_is_learned_by_heart(tmp_path: Path, sharp_target: Path, initialise: str) -> None:
    """The self-test of the whole path: capture, mask, shift, teacher, loss, feedback, evaluation."""
    folder, _ = made(tmp_path / "captures", sharp_target, train=1, heldout=0)
    named = TargetSettings(name=str(sharp_target))
    settings = SETTINGS.model_copy(
        update={"epochs": 100, "batch_tokens": 32, "learning_rate": 5e-3, "save_every": 1000, "initialise": initialise}
    )
    train(folder, tmp_path / "draft", settings, DraftSettings(vocab_size=259), named)
    found = evaluate(tmp_path / "draft", folder, EvaluateSettings(steps=3), named, split="train")
    assert found["accuracy"] == found["survival"] == [1.0, 1.0, 1.0] and found["accept_length"] == 4.0


def test_the_teacher_is_the_target_itself(target: Target) -> None:
    sample = make_samples(target, 1, 0)[0]
    with torch.no_grad():
        logits_TV = target.model(input_ids=sample.ids_T[None]).logits[0]
    words = torch.arange(0, 259, 2)
    teacher = Teacher(target, words, "before")
    torch.testing.assert_close(teacher.probabilities(sample.last_hidden_TH), logits_TV[:, words].softmax(-1))
    assert torch.equal(teacher.argmax(sample.last_hidden_TH), logits_TV.argmax(-1))
    normed = target.final_norm(sample.last_hidden_TH)
    assert torch.equal(Teacher(target, words, "after").argmax(normed), logits_TV.argmax(-1))


@pytest.mark.parametrize("fed_back", [False, True])
def test_a_draft_started_from_the_target_has_its_head_final_norm_and_shape(target: Target, fed_back: bool) -> None:
    config = draft_config(target, BOUNDARIES, SHAPE.model_copy(update={"norm_output": fed_back}))
    draft = new_draft(target, config, torch.arange(259), "target", seed=0)
    rows, gain = target.head.weight[torch.arange(128) + draft.d2t], target.final_norm.weight
    assert gain.std() > 0.01, "else nothing is told apart"
    torch.testing.assert_close(draft.lm_head.weight, rows * gain if fed_back else rows)
    torch.testing.assert_close(draft.norm.weight, torch.ones_like(gain) if fed_back else gain)
    assert config.rope_theta == 10_000.0 and config.max_position_embeddings == 1024
    assert (config.intermediate_size, config.num_key_value_heads, config.head_dim) == (128, 2, 16)


def test_a_new_draft_looks_at_its_own_next_token(target: Target) -> None:
    draft = new_draft(target, draft_config(target, BOUNDARIES, SHAPE), torch.arange(259), "target", seed=0)
    layer, seen = draft.layers[0], []

    def attend(number: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query[0, 0] @ key[0, 0].T / query.shape[-1] ** 0.5
        seen.append((float(scores.diagonal().mean()), float(scores.mean())))
        return query

    with torch.no_grad():
        embeds = draft.embed_tokens(torch.randint(0, 259, (1, 40)))
        same_place = draft.rope(torch.zeros(1, 40, dtype=torch.int64))
        layer(embeds, torch.randn(1, 40, 64), same_place, attend)
    own, others = seen[0]
    assert 3 < own < 5.5 and abs(others) < 1


def test_the_gain_of_a_norm_is_seen_whatever_its_spelling() -> None:
    class OnePlus(torch.nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)

    norm = OnePlus(4, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.0, 1.0, -0.5, 2.0]))
        torch.testing.assert_close(gain(norm, torch.zeros(4)), torch.tensor([1.0, 2.0, 0.5, 3.0]))
        assert gain(torch.nn.LayerNorm(4), torch.zeros(4)).tolist() == [1, 1, 1, 1]


def test_each_epoch_holds_every_sample_once_and_batches_keep_their_size() -> None:
    indices = order(5, 2.4, seed=3)
    assert sorted(indices[:5]) == sorted(indices[5:10]) == [0, 1, 2, 3, 4] and len(indices) == 12
    assert indices == order(5, 2.4, seed=3) != order(5, 2.4, seed=4)
    assert pack([0, 1, 2, 0], [6, 3, 20], 10) == [[0, 1], [2], [0]]


def test_the_next_steps_batches_are_read_while_one_is_computed_and_each_once() -> None:
    asked, gone_on = [], Event()

    def read(step: int) -> list:
        asked.append(step)
        if step == 1:
            assert gone_on.wait(60), "read before it was asked for"
        if step == 2:
            raise OSError("disk")
        return [step]

    ahead = Ahead(read, 4)
    assert ahead.take(0) == [0]  # while step 1 is being read
    gone_on.set()
    assert ahead.take(1) == [1]
    with pytest.raises(OSError, match="disk"):
        ahead.take(2)
    assert ahead.take(3) == [3] and asked == [0, 1, 2, 3]


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    settings = TrainSettings(learning_rate=1.0, warmup=0.1, final_learning_rate=0.1)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0 and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_likely_token_enters_the_vocabulary_before_one_that_was_hardly_counted(target: Target) -> None:
    counts, expected = torch.zeros(259), torch.zeros(259)
    counts[10:16] = torch.tensor([50.0, 30.0, 20.0, 3.0, 2.0, 1.0])
    expected[[10, 11, 200, 201]] = torch.tensor([0.5, 0.4, 0.06, 0.04])
    config = draft_config(target, BOUNDARIES, DraftSettings(vocab_size=7))
    kept = {}
    for name, shares in (("counted", None), ("expected", expected)):
        draft = new_draft(target, config, counts, "target", 0, shares)
        kept[name] = draft.t2d.nonzero().flatten().tolist()
    assert kept == {"counted": [2, 10, 11, 12, 13, 14, 15], "expected": [2, 10, 11, 12, 13, 200, 201]}


def test_expected_shares_are_the_targets_own_probabilities(tmp_path: Path, target: Target) -> None:
    samples = make_samples(target, 2, 0)
    folder = write_captures(tmp_path / "captures", target, samples)
    found = expected_counts(target, CaptureReader(folder), [0, 1])
    rows = []
    for sample in samples:
        with torch.no_grad():
            logits_TV = target.model(input_ids=sample.ids_T[None]).logits[0]
        rows.append(logits_TV[:-1][sample.loss_mask_T[1:]].softmax(-1))
    torch.testing.assert_close(found, torch.cat(rows).double().mean(0), rtol=1e-4, atol=1e-7)
    assert abs(float(found.sum()) - 1) < 1e-4
