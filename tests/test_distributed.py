"""Several processes train as one does: the same gradients, losses and draft, also after one of them was lost."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import many
from eyas.errors import InputError
from eyas.models.checkpoint import draft_tensors, load_draft
from eyas.models.target import load_target
from eyas.ranks import Place, place_of, refuse_several
from eyas.recipe import DraftSettings, TargetSettings, TrainSettings
from eyas.run import read_manifest
from eyas.training.batches import parts
from eyas.training.loop import Trainer, train
from eyas.training.trainer_state import STATES, step_folders
from made_captures import made, make_samples, poisoned, write_captures
from many import (
    Ended,
    command,
    command_of_ones_own,
    command_that_counts_iterations,
    command_that_keeps_gradients,
    command_that_overflows,
    command_with,
    die,
    freeze,
    interrupt,
    main_alone,
    stumble,
    together,
)
from test_captures import write_responses

SETTINGS = TrainSettings(
    epochs=2,
    batch_tokens=32,
    accumulate=4,
    save_every=3,
    precision="float32",
    evaluate_every=4,
    evaluate_samples=3,
)
SHAPE = DraftSettings(vocab_size=128)
FLAGS = [
    *("--epochs=2", "--batch-tokens=32", "--accumulate=4", "--save-every=3", "--precision=float32"),
    *("--evaluate-every=4", "--evaluate-samples=3", "--draft.vocab-size=128", "--rank-timeout-s=30"),
]
STILL = 1e-12
"""A learning rate that moves nothing: gradients of every step are then taken at the same weights. At a real one AdamW's
first steps are signs of gradients, some of which are rounding, and 1e-8 becomes 1e-3."""
SLOW = pytest.mark.distributed


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return made(tmp_path_factory.mktemp("captures") / "captures", tiny_target, train=24)[0]


@pytest.fixture
def argv(captures: Path, tmp_path: Path, tiny_target: Path) -> Callable[..., list[str]]:
    def call(out: str, *more: str, captures: Path = captures) -> list[str]:
        paths = ["--captures", str(captures), "--out", str(tmp_path / out), "--target", str(tiny_target)]
        named = {flag.partition("=")[0] for flag in more}
        return ["train", *paths, *(flag for flag in FLAGS if flag.partition("=")[0] not in named), *more]

    return call


@pytest.fixture(scope="module")
def alone(captures: Path, tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, list[dict]]:
    """One process: its folder, and its gradients at every step."""
    out, kept = tmp_path_factory.mktemp("alone") / "draft", list[dict[str, torch.Tensor]]()
    clip = many.keep_gradients(kept)
    settings = SETTINGS.model_copy(update={"learning_rate": STILL})
    train(captures, out, settings, SHAPE, TargetSettings(name=str(tiny_target)))
    Trainer.clip = clip
    return out, kept


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def fine(ranks: list[Ended]) -> None:
    assert [rank.code for rank in ranks] == [0] * len(ranks), "\n".join(rank.err for rank in ranks)


def same_run(out: Path, other: Path) -> None:
    """The same steps, losses, counts and held-out accept lengths, and the same draft."""
    ours, theirs = lines(out), lines(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert one["rows"] == two["rows"] and one["tokens"] == two["tokens"]
        assert one["loss"] == pytest.approx(two["loss"], abs=2e-5), one["step"]
        assert one.get("heldout_accept_length") == two.get("heldout_accept_length")


@pytest.mark.parametrize(
    ("size", "parallel"),
    [(2, "ddp"), (2, "fsdp"), pytest.param(4, "ddp", marks=SLOW), pytest.param(4, "fsdp", marks=SLOW)],
)
def test_gradients_and_losses_are_those_of_one_process(
    tmp_path: Path, argv: Callable[..., list[str]], alone: tuple[Path, list[dict]], size: int, parallel: str
) -> None:
    flags = argv("draft", "--parallel", parallel, "--json", "--learning-rate", str(STILL))
    ranks = together(tmp_path / "log", size, command_that_keeps_gradients, flags, tmp_path / "gradients.pt")
    fine(ranks)
    kept = torch.load(tmp_path / "gradients.pt")
    assert len(kept) == len(alone[1]) > 5
    for step, (ours, theirs) in enumerate(zip(kept, alone[1], strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            difference = (ours[name] - theirs[name]).abs().max().item()
            assert difference <= 1e-6, (step, name, difference)
    same_run(tmp_path / "draft", alone[0])
    assert json.loads(ranks[0].out)["facts"]["processes"] == size
    assert all(rank.out == rank.err == "" for rank in ranks[1:]), "one speaks for all"
    assert read_manifest(tmp_path / "draft").facts["processes"] == size


def test_a_lost_rank_ends_the_others_and_another_number_goes_on_to_the_same_losses(
    tmp_path: Path, argv: Callable[..., list[str]], captures: Path, tiny_target: Path
) -> None:
    """2 processes, of which one is killed; 4 with sharded weights, of which one is; then one alone."""
    out = tmp_path / "cut"
    for size, parallel, step, checkpoints in (
        (2, "ddp", 5, ["step-3", "step-4"]),
        (4, "fsdp", 7, ["step-4", "step-6"]),
    ):
        flags = argv("cut", "--parallel", parallel)
        ranks = together(tmp_path / f"log{size}", size, command_with, flags, 1, step, die)
        assert [rank.code for rank in ranks] == [3, -9, *[3] * (size - 2)]
        assert sum("wanted: " in rank.err for rank in ranks) == 1, "said once"
        assert f"wanted: {size} processes at work" in "".join(rank.err for rank in ranks)
        assert [folder.name for folder in step_folders(out)] == checkpoints
    named = TargetSettings(name=str(tiny_target))
    assert train(captures, out, SETTINGS, SHAPE, named).facts["processes"] == 1
    train(captures, tmp_path / "whole", SETTINGS, SHAPE, named)
    same_run(out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("parallel", "flags", "wanted"),
    [
        ("ddp", [], "finite states in every sample"),
        ("ddp", ["--initialise=target", "--draft.vocab-size=259"], "a finite loss at step "),
        pytest.param("fsdp", ["--initialise=target", "--draft.vocab-size=259"], "a finite loss at step ", marks=SLOW),
    ],
)
def test_states_that_are_not_finite_are_named_by_whoever_reads_them_and_said_once(
    tmp_path: Path, argv: Callable[..., list[str]], tiny_target: Path, parallel: str, flags: list[str], wanted: str
) -> None:
    """By the start of both, and by the process that has the sample where a start reads none."""
    target = load_target(str(tiny_target))
    samples = make_samples(target, train=8, heldout=0)
    folder = write_captures(tmp_path / "captures", target, [*samples[:4], poisoned(samples[4]), *samples[5:]])
    flags = argv("draft", "--save-every=1", "--parallel", parallel, "--json", *flags, captures=folder)
    ranks = together(tmp_path / "log", 2, command, flags)
    assert [rank.code for rank in ranks] == [2, 2]
    (said,) = [json.loads(rank.out)["error"] for rank in ranks if rank.out]
    assert said["got"].endswith("states that are not finite in: sample-4") and said["wanted"].startswith(wanted)
    for kept in step_folders(tmp_path / "draft"):
        assert all(tensor.isfinite().all() for tensor in draft_tensors(load_draft(kept)[0]).values())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@SLOW
def test_a_sample_that_overflows_by_itself_is_named_alone(
    tmp_path: Path, argv: Callable[..., list[str]], parallel: str
) -> None:
    """Its states are finite: each process tries its own samples one by one."""
    ranks = together(tmp_path / "log", 2, command_that_overflows, argv("draft", "--parallel", parallel), "sample-2")
    assert [rank.code for rank in ranks] == [2, 2]
    assert "; samples: sample-2\n" in "".join(rank.err for rank in ranks)
    assert step_folders(tmp_path / "draft")


def test_different_settings_are_named_before_anything_is_written(
    tmp_path: Path, argv: Callable[..., list[str]]
) -> None:
    ranks = together(tmp_path / "log", 2, command_of_ones_own, argv("draft"))
    assert [rank.code for rank in ranks] == [2, 2]
    said = "".join(rank.err for rank in ranks)
    assert "got:    train.learning_rate of every process = 0.5" in said and "(rank 1)" in said
    assert said.count("wanted: ") == 1 and not (tmp_path / "draft").exists()


def test_more_processes_than_samples_a_step_are_refused_with_what_to_set(
    tmp_path: Path, argv: Callable[..., list[str]]
) -> None:
    ranks = together(tmp_path / "log", 2, command, argv("draft", "--batch-tokens=1", "--accumulate=1"))
    assert [rank.code for rank in ranks] == [2, 2]
    said = "".join(rank.err for rank in ranks)
    assert said.count("wanted: at least one sample in an optimiser step for each of 2 processes") == 1
    assert "next:   --accumulate 2, or --nproc-per-node 1" in said


@SLOW
def test_a_checkpoint_cut_short_is_named_once_and_the_one_before_goes_on(
    tmp_path: Path, argv: Callable[..., list[str]]
) -> None:
    together(tmp_path / "log", 2, command_with, argv("draft", "--parallel=fsdp"), 0, 7, die)
    newest = step_folders(tmp_path / "draft")[-1]
    assert newest.name == "step-6"
    cut = sorted((newest / STATES).iterdir())[-1]
    cut.write_bytes(cut.read_bytes()[:-20])
    ranks = together(tmp_path / "log", 4, command, argv("draft"))
    assert [rank.code for rank in ranks] == [2, 2, 2, 2]
    said = "".join(rank.err for rank in ranks)
    assert said.count("wanted: a whole checkpoint") == 1 and str(cut) in said and f"remove {newest} " in said
    shutil.rmtree(newest)
    fine(together(tmp_path / "log", 2, command, argv("draft")))


@SLOW
def test_a_fault_of_one_process_reaches_the_others_by_its_name(tmp_path: Path, argv: Callable[..., list[str]]) -> None:
    ranks = together(tmp_path / "log", 2, command_with, argv("draft"), 1, 2, stumble)
    assert [rank.code for rank in ranks] == [3, 1]
    assert "got:    rank 1 failed: ZeroDivisionError: a fault of our own" in ranks[0].err
    assert "Traceback" in ranks[1].err and "Traceback" not in ranks[0].err


@SLOW
def test_a_silent_process_ends_the_others_when_the_time_is_over(tmp_path: Path, argv: Callable[..., list[str]]) -> None:
    flags = argv("draft", "--rank-timeout-s=8")
    ranks = together(tmp_path / "log", 2, command_with, flags, 1, 3, freeze, seconds=20)
    assert [rank.code for rank in ranks] == [3, -9]
    assert "wanted: 2 processes at work" in ranks[0].err and "gone or silent" in ranks[0].err


@SLOW
def test_an_interrupt_of_one_process_saves_and_stops_all(tmp_path: Path, argv: Callable[..., list[str]]) -> None:
    ranks = together(tmp_path / "log", 2, command_with, argv("draft"), 1, 4, interrupt)
    assert [rank.code for rank in ranks] == [130, 130]
    assert step_folders(tmp_path / "draft")[-1].name == "step-5"
    assert ranks[0].err.count("the same command resumes") == 1 and ranks[1].err == ""


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (2, "ddp"),
        pytest.param(2, "fsdp", marks=SLOW),
        pytest.param(3, "ddp", marks=SLOW),
        pytest.param(4, "fsdp", marks=SLOW),
    ],
)
def test_muon_iterates_on_each_matrix_in_one_process_and_moves_all_as_one_does(
    tmp_path: Path, argv: Callable[..., list[str]], captures: Path, tiny_target: Path, size: int, parallel: str
) -> None:
    flags = argv("draft", "--optimiser=muon", f"--parallel={parallel}")
    fine(together(tmp_path / "log", size, command_that_counts_iterations, flags, tmp_path))
    settings = SETTINGS.model_copy(update={"optimiser": "muon"})
    train(captures, tmp_path / "alone", settings, SHAPE, TargetSettings(name=str(tiny_target)))
    ours, theirs = lines(tmp_path / "draft"), lines(tmp_path / "alone")
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], abs=1e-4)
    made = [json.loads((tmp_path / f"iterations-{rank}.json").read_text()) for rank in range(size)]
    assert sum(map(len, made)) == 8 * len(ours), "fc, query, key, value, output, gate, up, down"
    assert max(map(len, made)) == -(-8 // size) * len(ours)


@SLOW
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "shape",
    [
        ["--draft.method=peagle"],
        ["--draft.num-hidden-layers=2", "--draft.block=qwen3"],
        ["--draft.block=mla"],
        ["--head=trained"],
    ],
)
def test_other_drafts_are_shared_too(
    tmp_path: Path, argv: Callable[..., list[str]], shape: list[str], parallel: str
) -> None:
    shape = [*shape, f"--learning-rate={STILL}"]
    fine(together(tmp_path / "log", 2, command, argv("two", f"--parallel={parallel}", *shape)))
    main_alone(argv("one", *shape))
    same_run(tmp_path / "two", tmp_path / "one")


@SLOW
def test_online_training_is_shared_too(tmp_path: Path, tiny_target: Path) -> None:
    """Each process runs a target of its own for its part of the samples."""
    responses = write_responses(tmp_path / "responses", load_target(str(tiny_target)), [12, 20, 31, 18, 25, 14, 40])
    flags = ["--responses", str(responses), "--target", str(tiny_target), *FLAGS, "--learning-rate=1e-12"]
    flags += ["--capture.precision=float32", "--capture.store=float32", "--capture.batch-tokens=1"]
    fine(together(tmp_path / "log", 2, command, ["train", "--out", str(tmp_path / "two"), *flags]))
    main_alone(["train", "--out", str(tmp_path / "one"), *flags])
    same_run(tmp_path / "two", tmp_path / "one")


@SLOW
def test_torchrun_itself_starts_ends_and_restarts_it(tmp_path: Path, argv: Callable[..., list[str]]) -> None:
    """The words of docs/training.md, typed: a killed worker is started anew by torchrun and goes on."""
    once = tmp_path / "once.py"
    once.write_text(
        "import os, sys\nfrom pathlib import Path\nimport many\nmark = Path(sys.argv[1])\n"
        "if mark.exists():\n    many.command(sys.argv[2:])\nelse:\n"
        "    many.command_with(sys.argv[2:], 1, 5, lambda: (mark.touch(), many.die()))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    ran = subprocess.run(
        [*torchrun, str(once), str(tmp_path / "mark"), *argv("draft")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert read_manifest(tmp_path / "draft").facts["steps"] > 5
    assert ran.stderr.count("wanted: 2 processes at work") == 1 and "resuming at step 4" in ran.stderr


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 5))
def test_the_parts_of_a_step_are_its_samples_as_evenly_as_they_go(step: list[list[int]], ranks: int) -> None:
    lengths = [length for batch in step for length in batch]
    numbers = iter(range(len(lengths)))
    batches = [[next(numbers) for _ in batch] for batch in step]
    found = parts(batches, lengths, 32, ranks)
    assert sorted(index for part in found for batch in part for index in batch) == list(range(len(lengths)))
    assert len(found) == ranks and len({len(part) for part in found}) == 1, "as many forwards everywhere"
    assert all(len(batch) <= 1 or sum(lengths[i] for i in batch) <= 32 for part in found for batch in part if ranks > 1)
    tokens = [sum(lengths[index] for batch in part for index in batch) for part in found]
    assert max(tokens) - min(tokens) <= max(lengths)
    assert ranks > 1 or found == [batches]


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place()),
        ({"RANK": "3"}, Place()),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, Place()),
        (TORCHRUN, Place(1, 4, 1, 0)),
        (TORCHRUN | {"RANK": "3", "GROUP_RANK": "1"}, Place(3, 4, 1, 1)),
        ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}, Place(1, 4, 1, 0)),
    ],
)
def test_the_environment_names_the_place(environment: dict[str, str], place: Place) -> None:
    assert place_of(environment) == place


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        ({"MASTER_ADDR": ""}, "no MASTER_ADDR"),
        ({"RANK": "", "MASTER_PORT": ""}, "no RANK, no MASTER_PORT"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"WORLD_SIZE": "many"}, "invalid literal for int() with base 10: 'many'"),
    ],
)
def test_an_environment_that_is_not_torchruns_is_refused_with_the_line_to_type(
    changed: dict[str, str], got: str
) -> None:
    with pytest.raises(InputError) as caught:
        place_of(TORCHRUN | changed)
    assert caught.value.got == got and "torchrun --nproc-per-node" in caught.value.next


def test_a_recipe_is_run_by_one_process() -> None:
    with pytest.raises(InputError, match="without torchrun"):
        refuse_several(TORCHRUN, "run")
    refuse_several({}, "run")
