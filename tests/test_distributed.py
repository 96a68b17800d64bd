"""Several processes train as one does: the same gradients, losses and draft, also after one of them was lost."""

import json
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
from eyas.ranks import place_of
from eyas.recipe import DraftSettings, TargetSettings, TrainSettings
from eyas.run import read_manifest
from eyas.training.batches import pack, parts
from eyas.training.loop import Trainer, train
from made_captures import made, make_samples, write_captures
from many import Ended, command, command_that_keeps_gradients, command_with, ended, started, together

SETTINGS = TrainSettings(
    epochs=2, batch_tokens=128, save_every=3, precision="float32", evaluate_every=4, evaluate_samples=3
)
STILL = 1e-12
"""A learning rate that moves nothing: gradients of every step are then taken at the same weights. At a real one AdamW's
first steps are signs of gradients, some of which are rounding, and 1e-8 becomes 1e-3."""
FLAGS = (
    "--epochs 2 --batch-tokens 128 --save-every 3 --precision float32 --evaluate-every 4 --evaluate-samples 3 "
    "--draft.vocab-size 128 --rank-timeout-s 30"
).split()
SHAPE = DraftSettings(vocab_size=128)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return made(tmp_path_factory.mktemp("captures") / "captures", tiny_target, train=24)[0]


@pytest.fixture
def argv(captures: Path, tmp_path: Path, tiny_target: Path) -> Callable[..., list[str]]:
    def call(out: str, *more: str, captures: Path = captures) -> list[str]:
        paths = ["--captures", str(captures), "--out", str(tmp_path / out), "--target", str(tiny_target)]
        return ["train", *paths, *FLAGS, *more]

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


def weights(out: Path) -> dict[str, torch.Tensor]:
    return draft_tensors(load_draft(out)[0])


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
    first, second = weights(out), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(("size", "parallel"), [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp")])
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
