"""Training that goes on from a draft: ours or made elsewhere, its vocabulary map kept, what does not fit refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from eyas.errors import InputError
from eyas.models.checkpoint import CONFIG, draft_tensors, load_draft, read_info
from eyas.models.target import Target, load_target
from eyas.pipeline.run import chain_findings
from eyas.recipe import DraftSettings, Recipe, TargetSettings, TrainSettings
from eyas.run import Manifest, read_manifest
from eyas.training import loop
from eyas.training.loop import train
from eyas.training.metrics import METRICS
from made_captures import made, make_samples, write_captures
from test_foreign import made_elsewhere

SETTINGS = TrainSettings(
    epochs=4, batch_tokens=64, ttt_length=2, save_every=3, precision="float32", evaluate_every=0, learning_rate=2e-3
)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return made(tmp_path_factory.mktemp("captures") / "captures", tiny_target)[0]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, captures: Path, tiny_target: Path) -> Path:
    """A draft of ours, as a stage folder."""
    folder = tmp_path_factory.mktemp("first") / "draft"
    train(captures, folder, SETTINGS, DraftSettings(vocab_size=30), TargetSettings(name=str(tiny_target)))
    return folder


def go_on(captures: Path, out: Path, start: Path, target: Path, shape: DraftSettings | None = None) -> Manifest:
    settings = SETTINGS.model_copy(update={"start_from": str(start), "epochs": 1})
    return train(captures, out, settings, shape, TargetSettings(name=str(target)))


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / METRICS).read_text().splitlines()]


def test_a_draft_of_ours_goes_on_where_it_stood_with_its_vocabulary(
    captures: Path, first: Path, tmp_path: Path, tiny_target: Path
) -> None:
    manifest = go_on(captures, tmp_path / "on", first, tiny_target)
    assert losses(tmp_path / "on")[0] < losses(first)[0] - 0.3
    before, after = (load_draft(folder)[0] for folder in (first, tmp_path / "on"))
    assert torch.equal(before.d2t, after.d2t) and before.config == after.config
    assert not torch.equal(before.fc.weight, after.fc.weight)
    assert 0.3 < manifest.facts["vocabulary_coverage"] < 1


def test_a_start_that_was_replaced_is_said_and_a_way_to_begin_beside_one_is_refused(
    captures: Path, first: Path, tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, out = tmp_path / "start", tmp_path / "on"
    shutil.copytree(first / str(read_manifest(first).facts["draft"]), start)
    go_on(captures, out, start, tiny_target)
    capsys.readouterr()
    go_on(captures, out, start, tiny_target)
    assert "another draft" not in capsys.readouterr().err
    shutil.rmtree(start)
    shutil.copytree(out / str(read_manifest(out).facts["draft"]), start)
    go_on(captures, out, start, tiny_target)
    assert f"began from another draft than {start} holds now" in capsys.readouterr().err
    beside = {**SETTINGS.model_dump(exclude_unset=True), "start_from": str(start), "initialise": "random"}
    with pytest.raises(InputError, match="random, beside a draft to go on from"):
        train(captures, tmp_path / "r", TrainSettings(**beside), target=TargetSettings(name=str(tiny_target)))


@pytest.mark.parametrize("writer", ["specforge", "speculators", "modelopt"])
def test_a_draft_made_elsewhere_goes_on_and_is_ours_then(
    captures: Path, tmp_path: Path, tiny_target: Path, target: Target, writer: str
) -> None:
    draft = made_elsewhere(tmp_path / "theirs", writer)
    go_on(captures, tmp_path / "on", tmp_path / "theirs", tiny_target)
    back, info = load_draft(tmp_path / "on", target.embedding)
    assert torch.equal(back.d2t, draft.d2t) and torch.equal(back.t2d, draft.t2d)
    assert (info.ttt_length, info.target, info.tokenizer_hash) == (2, target.identity, target.tokenizer_hash)
    assert not torch.equal(back.fc.weight, draft.fc.weight)


def test_the_boundaries_of_a_draft_that_names_none_are_the_captures(
    captures: Path, tmp_path: Path, tiny_target: Path
) -> None:
    made_elsewhere(tmp_path / "theirs", "eagle")
    go_on(captures, tmp_path / "on", tmp_path / "theirs", tiny_target)
    assert read_info(tmp_path / "on").draft.boundaries == (2, 4, 5)


def test_a_killed_run_resumes_without_the_folder_it_started_from(
    captures: Path, first: Path, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    shutil.copytree(first, start)
    whole, advance = go_on(captures, tmp_path / "whole", start, tiny_target), loop.Trainer.advance

    def dying(trainer: loop.Trainer) -> dict:
        if trainer.step == 3:
            raise RuntimeError("killed")
        return advance(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "advance", dying)
        with pytest.raises(RuntimeError, match="killed"):
            go_on(captures, tmp_path / "cut", start, tiny_target)
    shutil.rmtree(start)
    assert go_on(captures, tmp_path / "cut", start, tiny_target).facts == whole.facts
    one, other = (draft_tensors(load_draft(tmp_path / folder)[0]) for folder in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def changed(first: Path, folder: Path, **facts: object) -> Path:
    """A copy of our draft whose `eyas` block says something else."""
    shutil.copytree(next(iter(first.glob("step-*"))), folder)
    raw = json.loads((folder / CONFIG).read_text())
    raw["eyas"] |= facts
    (folder / CONFIG).write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"tokenizer_hash": "other"}, "tokenizer_mismatch"),
        ({"last_hidden_norm": "after"}, "teacher_not_normed"),
    ],
)
def test_a_draft_of_another_make_is_refused_by_its_findings_code(
    captures: Path, first: Path, tmp_path: Path, tiny_target: Path, facts: dict, code: str
) -> None:
    with pytest.raises(InputError) as caught:
        go_on(captures, tmp_path / "on", changed(first, tmp_path / "start", **facts), tiny_target)
    assert caught.value.code == code


def test_a_draft_of_another_target_is_refused(captures: Path, first: Path, tmp_path: Path, tiny_target: Path) -> None:
    raw = read_info(first).target.model_dump() | {"weights_hash": "other"}
    with pytest.raises(InputError) as caught:
        go_on(captures, tmp_path / "on", changed(first, tmp_path / "start", target=raw), tiny_target)
    assert caught.value.code == "target_revision"


def test_another_template_is_said_and_learned(
    captures: Path, first: Path, tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on(captures, tmp_path / "on", changed(first, tmp_path / "start", template_hash="other"), tiny_target)
    said = capsys.readouterr().err
    assert "template_mismatch" in said and "of the supervised tokens" in said


def test_drafts_of_other_taps_are_refused(tmp_path: Path, first: Path, target: Target, tiny_target: Path) -> None:
    other = write_captures(tmp_path / "captures", target, make_samples(target, 2, 0), boundaries=[1, 4, 5])
    made_elsewhere(tmp_path / "theirs", "specforge")
    for start in (first, tmp_path / "theirs"):
        with pytest.raises(InputError) as caught:
            go_on(other, tmp_path / "on", start, tiny_target)
        assert caught.value.code == "tap_offset"


def test_a_vocabulary_map_that_drops_a_stop_token_is_refused(
    captures: Path, tmp_path: Path, tiny_target: Path, target: Target
) -> None:
    stop = target.stop_ids[0]

    def drop(raw: dict, tensors: dict) -> None:
        rows = torch.arange(len(tensors["d2t"]))
        ids = torch.tensor([number for number in range(target.vocab_size) if number != stop])[: len(rows)]
        tensors["d2t"] = ids - rows
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)

    made_elsewhere(tmp_path / "theirs", "specforge", drop)
    with pytest.raises(InputError, match=rf"\[{stop}\] left out") as caught:
        go_on(captures, tmp_path / "on", tmp_path / "theirs", tiny_target)
    assert caught.value.code == "vocab_mismatch"


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ({"vocab_size": 64}, "draft.vocab_size"),
        ({"norm_output": False}, "draft.norm_output"),
        ({"num_hidden_layers": 2}, "draft.num_hidden_layers"),
    ],
)
def test_a_shape_asked_for_that_the_draft_has_not_is_refused(
    captures: Path, first: Path, tmp_path: Path, tiny_target: Path, shape: dict, field: str
) -> None:
    with pytest.raises(InputError, match=field):
        go_on(captures, tmp_path / "on", first, tiny_target, DraftSettings(**shape))


def test_a_chain_longer_than_training_unrolls_is_a_warning_of_the_recipe() -> None:
    recipe = Recipe.model_validate({"train": {"ttt_length": 3}, "bench": {"num_steps": 4}, "serve": {"num_steps": 3}})
    (found,) = chain_findings(recipe)
    assert (found.code, found.severity, found.where) == ("ttt_mismatch", "warning", "recipe: bench.num_steps")
    assert chain_findings(Recipe()) == []
