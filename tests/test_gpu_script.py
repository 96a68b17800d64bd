"""The GPU script on a CPU: pieces come back whole, a trial sets the epochs, and what comes back is a draft."""

import importlib.util
import json
import os
import signal
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.packed import pack
from eyas.errors import InputError
from eyas.models.checkpoint import draft_tensors, load_draft
from eyas.models.target import load_target
from eyas.run import is_complete
from eyas.training import loop
from test_captures import write_responses

SHIPPING = Path(__file__).parents[1] / "shipping"
RECIPE = """
[target]
name = "{target}"
[capture]
precision = "float32"
[draft]
vocab_size = 128
fc_norm = false
[train]
epochs = {epochs}
ttt_length = 2
batch_tokens = 64
precision = "float32"
evaluate_samples = 2
"""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SHIPPING / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return script("gpu")


@given(data=st.binary(max_size=200), size=st.integers(1, 64))
def test_pieces_come_back_whole_and_small(
    gpu: ModuleType, tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    names = gpu.write_pieces(data, "x", folder, size)
    assert all((folder / name).stat().st_size <= size for name in names)
    assert gpu.read_pieces("x", folder) == data


def test_a_piece_that_is_missing_or_changed_is_named(gpu: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.json"):
        gpu.read_pieces("x", tmp_path)
    gpu.write_pieces(b"0123456789", "x", tmp_path, 4)
    (tmp_path / "x.2").write_bytes(b"8?")
    with pytest.raises(InputError, match=r"the piece x\.2; got other bytes"):
        gpu.read_pieces("x", tmp_path)
    (tmp_path / "x.1").unlink()
    with pytest.raises(InputError, match=r"the piece x\.1; got no such file"):
        gpu.read_pieces("x", tmp_path)


def test_parts_of_the_target_travel_in_folders_of_their_own(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "g").write_bytes(bytes(range(101)))
    monkeypatch.setattr(gpu, "find_gguf", lambda: tmp_path / "g")
    gpu.main(["split", "--parts", "2", "--out", str(tmp_path / "parts")])
    sizes = [[p.stat().st_size for p in (tmp_path / "parts" / n).iterdir() if p.suffix != ".json"] for n in "01"]
    assert sizes == [[51], [50]]
    taken: list[bytes] = []
    monkeypatch.setattr(gpu, "default_target_folder", lambda path: taken.append(path.read_bytes()))
    gpu.joined_target(tmp_path / "parts")
    assert taken == [bytes(range(101))]


def dry_run(gpu: ModuleType, root: Path, target: Path, epochs: float, seconds: str, *more: str) -> Path:
    (root / "recipe.toml").write_text(RECIPE.format(target=target, epochs=epochs))
    lengths = [12, 20, 31, 18, 25, 14, 40, 22, 16, 27]
    pack([write_responses(root / "r", load_target(str(target)), lengths)], root / "answers.xz")
    flags = ["--recipe", str(root / "recipe.toml"), "--answers", str(root / "answers.xz"), "--work", str(root / "work")]
    small = ["--set", "train.batch_tokens=64", "--set", "train.save_every=2", "--set", "train.evaluate_every=0"]
    gpu.main(["train", *flags, *small, "--out", str(root / "out"), "--seconds", seconds, "--dry-run", *more])
    gpu.main(["join", str(root / "out"), "--out", str(root / "joined")])
    return root / "joined"


def test_a_dry_run_leaves_the_draft_that_it_trained_in_pieces(
    gpu: ModuleType, tmp_path: Path, tiny_target: Path
) -> None:
    joined = dry_run(gpu, tmp_path, tiny_target, 2.0, "60", "--piece", "20000")
    pieces = [path for path in (tmp_path / "out").glob("draft.zip.*") if path.suffix != ".json"]
    assert len(pieces) > 3 and all(path.stat().st_size <= 20000 for path in pieces)
    ours, theirs = (draft_tensors(load_draft(folder)[0]) for folder in (joined, tmp_path / "work" / "draft"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert is_complete(joined) and json.loads((tmp_path / "work" / "epochs.json").read_text()) == 2.0


def test_a_run_cut_by_the_clock_still_brings_its_newest_step(
    gpu: ModuleType, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "speed", lambda recipe, options: 1e9)
    advance = loop.Trainer.advance

    def up(trainer: loop.Trainer) -> dict:
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGINT)  # as the clock does
        return advance(trainer)

    monkeypatch.setattr(loop.Trainer, "advance", up)
    joined = dry_run(gpu, tmp_path, tiny_target, 50.0, "600")
    assert not is_complete(joined) and (joined / "progress.json").is_file()
    assert [path.name for path in joined.glob("step-*")] == ["step-4"]
    load_draft(joined)
    facts = script("pack_draft").training_facts(joined, joined / "step-4")
    assert (facts["of_step"], facts["steps"], facts["finished"]) == (4, 4, False) and facts["tokens"] > 0
    assert facts["settings"]["epochs"] == 50.0 and facts["precision"] == "float32"
    with pytest.raises(InputError, match="time was up"):
        gpu.packed_draft(tmp_path / "out")


def test_without_a_gpu_and_without_a_dry_run_it_says_so(gpu: ModuleType, tmp_path: Path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(SystemExit) as caught:
        gpu.main(["train", "--out", str(tmp_path)])
    assert caught.value.code == 2 and "CUDA" in capsys.readouterr().err
