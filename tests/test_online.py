"""Online training: the target beside the trainer gives what stored captures give, and writes no state."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eyas.cli import main
from eyas.data.captures import capture
from eyas.data.online import TargetSamples
from eyas.data.shards import CaptureReader, Sample
from eyas.errors import InputError
from eyas.models.checkpoint import draft_tensors, load_draft
from eyas.models.target import Target, load_target
from eyas.recipe import CaptureSettings, DraftSettings, TargetSettings, TrainSettings
from eyas.run import Manifest, read_manifest
from eyas.training import loop
from eyas.training.loop import train
from eyas.training.metrics import METRICS
from test_captures import write_responses
from test_flow import RECIPE, run
from tiny import save_tiny_target

SHAPE = DraftSettings(vocab_size=128)
SETTINGS = TrainSettings(epochs=2, batch_tokens=64, ttt_length=2, save_every=3, precision="float32", evaluate_every=4)
LENGTHS = [12, 20, 31, 18, 25, 14, 40, 22, 16, 27]
ALONE = CaptureSettings(precision="float32", store="float32", batch_tokens=1)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture(scope="module")
def responses(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    return write_responses(tmp_path_factory.mktemp("online") / "responses", target, LENGTHS)


def both(
    root: Path, responses: Path, target: Path, how: CaptureSettings, settings: TrainSettings = SETTINGS
) -> tuple[list[dict], list[dict], list[dict[str, torch.Tensor]]]:
    """Lines of a stored and of an online run over the same responses, and the weights of both."""
    named = TargetSettings(name=str(target))
    capture(responses, root / "captures", how, named)
    train(root / "captures", root / "stored", settings, SHAPE, named)
    train(responses, root / "online", settings, SHAPE, named, how)
    folders = (root / "stored", root / "online")
    stored, online = ([json.loads(line) for line in (one / METRICS).read_text().splitlines()] for one in folders)
    return stored, online, [draft_tensors(load_draft(one)[0]) for one in folders]


@pytest.mark.parametrize("store", ["float32", "bfloat16"])
def test_online_training_is_stored_training_bit_for_bit(
    tmp_path: Path, responses: Path, tiny_target: Path, store: str
) -> None:
    how = ALONE.model_copy(update={"store": store})
    stored, online, (one, other) = both(tmp_path, responses, tiny_target, how)
    keys = ("step", "loss", "accuracy", "gradient_norm", "heldout_accept_length")
    assert [[line.get(key) for key in keys] for line in stored] == [[line.get(key) for key in keys] for line in online]
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    manifest = read_manifest(tmp_path / "online", "draft")
    assert manifest.settings["capture"]["store"] == store and list(manifest.inputs) == ["responses"]


def test_a_held_out_answer_costs_one_forward_however_often_it_is_measured(
    tmp_path: Path, responses: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_all, asked = TargetSamples.read_all, list[int]()

    def counting(samples: TargetSamples, numbers: Sequence[int]) -> list[Sample]:
        asked.extend(number for number in numbers if samples.samples[number].split == "heldout")
        return read_all(samples, numbers)

    monkeypatch.setattr(TargetSamples, "read_all", counting)
    settings = SETTINGS.model_copy(update={"evaluate_every": 1, "evaluate_samples": 2})
    train(responses, tmp_path / "online", settings, SHAPE, TargetSettings(name=str(tiny_target)), ALONE)
    lines = [json.loads(line) for line in (tmp_path / "online" / METRICS).read_text().splitlines()]
    assert sum("heldout_accept_length" in line for line in lines) > 2
    assert len(asked) == len(set(asked)) == 2


def test_samples_that_share_a_forward_train_to_the_same_within_rounding(
    tmp_path: Path, responses: Path, tiny_target: Path
) -> None:
    how = ALONE.model_copy(update={"batch_tokens": 200})
    stored, online, _ = both(tmp_path, responses, tiny_target, how)
    assert [line["loss"] for line in stored] == pytest.approx([line["loss"] for line in online], rel=1e-4)


def test_a_teachers_argmax_that_is_not_the_next_token_is_the_same_online(
    tmp_path: Path, responses: Path, tiny_target: Path
) -> None:
    settings = SETTINGS.model_copy(update={"loss_on": "all", "evaluate_every": 0})
    stored, online, _ = both(tmp_path, responses, tiny_target, ALONE, settings)
    assert [line["loss"] for line in stored] == [line["loss"] for line in online]
    assert (tmp_path / "stored/argmax.int32").read_bytes() == (tmp_path / "online/argmax.int32").read_bytes()


def test_the_samples_are_the_stored_ones_in_the_same_order(
    tmp_path: Path, responses: Path, target: Target, tiny_target: Path
) -> None:
    how = ALONE.model_copy(update={"max_length": 24})
    capture(responses, tmp_path / "captures", how, TargetSettings(name=str(tiny_target)))
    stored = CaptureReader(tmp_path / "captures")
    online = TargetSamples(responses, read_manifest(responses), target, how)
    numbers = [4, 0, 7, 1]
    assert [entry.id for entry in online.samples] == [entry.id for entry in stored.samples]
    assert online.of_split("heldout") == stored.of_split("heldout") and online.greedy == stored.greedy
    for one, other in zip(stored.read_all(numbers), online.read_all(numbers), strict=True):
        assert one.id == other.id and one.split == other.split
        for name in ("taps_TA", "last_hidden_TH", "ids_T", "loss_mask_T"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    for number in numbers:
        assert stored.ids(number) == online.ids(number)
        assert torch.equal(stored.mask(number), online.mask(number))


def test_a_killed_online_run_resumes_to_the_same_weights_and_leaves_no_state(
    tmp_path: Path, responses: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = TargetSettings(name=str(tiny_target))

    def go(out: Path) -> Manifest:
        return train(responses, out, SETTINGS, SHAPE, named, ALONE)

    whole, advance = go(tmp_path / "whole"), loop.Trainer.advance

    def dying(trainer: loop.Trainer) -> dict:
        if trainer.step == 5:
            raise RuntimeError("killed")
        return advance(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "advance", dying)
        with pytest.raises(RuntimeError, match="killed"):
            go(tmp_path / "cut")
    assert go(tmp_path / "cut").facts == whole.facts
    one, other = (draft_tensors(load_draft(tmp_path / folder)[0]) for folder in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list(tmp_path.rglob("shard-?????.safetensors"))


def test_what_cannot_be_trained_on_is_refused_in_words(
    tmp_path: Path, responses: Path, target: Target, tiny_target: Path
) -> None:
    named = TargetSettings(name=str(tiny_target))
    other = save_tiny_target(tmp_path / "other", seed=5)
    with pytest.raises(InputError) as caught:
        train(responses, tmp_path / "a", SETTINGS, SHAPE, TargetSettings(name=str(other)), ALONE)
    assert caught.value.code == "target_revision"
    capture(responses, tmp_path / "captures", ALONE, named)
    with pytest.raises(InputError, match="a responses folder; got a captures folder"):
        train(tmp_path / "captures", tmp_path / "b", SETTINGS.model_copy(update={"online": True}), SHAPE, named)
    with pytest.raises(InputError) as caught:
        train(responses, tmp_path / "c", SETTINGS, SHAPE, named, ALONE.model_copy(update={"split": "heldout"}))
    assert "train split" in caught.value.wanted
    changed = write_responses(tmp_path / "changed", target, LENGTHS)
    with (changed / "responses.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(InputError, match="other bytes"):
        train(changed, tmp_path / "d", SETTINGS, SHAPE, named, ALONE)


@pytest.mark.parametrize("flags", [[], ["--captures", "c", "--responses", "r"]])
def test_the_command_takes_one_source(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--out", "d", "--json", *flags])
    assert caught.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"]["got"] == ("both" if flags else "neither")


def test_a_recipe_that_trains_online_stores_no_train_state(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(target=tiny_target).replace("[train]", "[train]\nonline = true"))
    result = run(capsys, recipe, out)
    assert result["check"]["verdict"] == "pass"
    counts = read_manifest(out / "captures").facts["counts"]
    assert counts["train"] == 0 and counts["heldout"] == counts["samples"] > 0
    assert list(read_manifest(out / "draft").inputs) == ["responses"]
    assert all(stage["skipped"] for stage in run(capsys, recipe, out)["stages"])
