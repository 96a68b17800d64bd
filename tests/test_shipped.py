"""The draft that comes with Eyas: packed as it is measured, found by its name, used by default, missed in words."""

import importlib.util
import json
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import eyas.shipped
from eyas.cli import main
from eyas.data.captures import capture
from eyas.errors import InputError
from eyas.formats.headers import read_headers
from eyas.models.checkpoint import draft_tensors, load_draft
from eyas.models.target import load_target
from eyas.pipeline.serve import prepare
from eyas.recipe import DraftSettings, EvaluateSettings, TargetSettings, TrainSettings, recipe_of
from eyas.run import hash_file
from eyas.shipped import Card, chosen_draft, draft_folder, read_card, shipped_root
from eyas.training.evaluate import evaluate
from eyas.training.loop import train
from test_captures import quick, write_responses

ROOT = Path(__file__).parents[1]
DEFAULT = TargetSettings().name


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "shipping" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """Answers, captures and a draft of the tiny target."""
    root, named = tmp_path_factory.mktemp("shipped"), TargetSettings(name=str(tiny_target))
    write_responses(root / "responses", load_target(str(tiny_target)), [12, 20, 31, 18, 25, 14, 40, 22])
    capture(root / "responses", root / "captures", quick(), named)
    settings = TrainSettings(epochs=2, batch_tokens=64, ttt_length=2, precision="float32", evaluate_every=2)
    shape = DraftSettings(vocab_size=128, fc_norm=False, norm_output=False)
    train(root / "captures", root / "draft", settings, shape, named)
    (root / "recipe.toml").write_text('name = "shipped"\n[draft]\nfc_norm = false\nnorm_output = false\n')
    return root


@pytest.fixture(scope="module")
def packed(run_folder: Path, tiny_target: Path) -> Path:
    """What `pack_draft.py` makes of them."""
    words = {"draft": "draft", "responses": "responses", "heldout": "captures", "test": "captures"}
    flags = [word for flag, name in words.items() for word in (f"--{flag}", str(run_folder / name))]
    flags += ["--recipe", str(run_folder / "recipe.toml"), "--target", str(tiny_target), "--steps", "3"]
    responses = json.loads((run_folder / "responses" / "manifest.json").read_text())
    responses["facts"] |= {"counts": {"samples": 8}, "sampling": {"temperature": 0.0}, "dtype": "float32"}
    (run_folder / "responses" / "manifest.json").write_text(json.dumps(responses))
    script("pack_draft").main([*flags, "--out", str(run_folder / "eagle3")])
    return run_folder / "eagle3"


@pytest.fixture
def held(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of Eyas that holds the packed draft."""
    monkeypatch.setattr(eyas.shipped, "shipped_root", lambda name="shipped": packed)
    return packed / "draft"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of Eyas made before a draft was trained."""
    monkeypatch.setattr(eyas.shipped, "shipped_root", lambda name="shipped": tmp_path / "eagle3")
    return tmp_path / "eagle3"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_what_is_loaded_is_what_was_trained_rounded_once(packed: Path, run_folder: Path) -> None:
    trained, shipped = (draft_tensors(load_draft(folder)[0]) for folder in (run_folder / "draft", packed / "draft"))
    assert trained.keys() == shipped.keys()
    for name, tensor in trained.items():
        whole = not tensor.is_floating_point()
        assert torch.equal(shipped[name], tensor if whole else tensor.to(torch.bfloat16)), name
    kinds = {header.dtype for name, header in read_headers(packed / "draft").items() if name not in ("d2t", "t2d")}
    assert kinds == {"BF16"}


def test_the_card_says_what_the_rounded_draft_reaches_and_where_it_is_from(
    packed: Path, run_folder: Path, tiny_target: Path
) -> None:
    card = read_card(packed / "draft")
    assert isinstance(card, Card)
    named = TargetSettings(name=str(tiny_target))
    found = evaluate(packed / "draft", run_folder / "captures", EvaluateSettings(steps=3), named)
    assert card.figures["heldout"].accept_length == found["accept_length_walk"]
    assert card.figures["test"].by_steps == found["walk_by_steps"] and card.figures["test"].steps == 3
    assert json.loads((packed / "evaluate" / "result.json").read_text()) == found
    assert card.form == (
        "plain EAGLE-3: 1 llama layer, taps 2, 4, 5, 128 of 259 tokens, bfloat16, the target's embedding"
    )
    assert card.prompts["count"] == 8 and card.prompts["by_split"] == {"train": 6, "heldout": 2}
    assert (
        0 < card.training["of_step"] <= card.training["steps"]
        and card.training["finished"]
        and card.answers["samples"] == 8
        and card.bytes > 10_000
    )
    text = (packed / "card.json").read_text()
    assert str(run_folder) not in text and str(Path.home()) not in text
    assert len((packed / "log.jsonl").read_text().splitlines()) == card.training["of_step"]
    assert tomllib.loads((packed / "recipe.toml").read_text())["name"] == "shipped"
    assert {path.name for path in packed.iterdir()} == {"card.json", "draft", "evaluate", "log.jsonl", "recipe.toml"}


def test_a_draft_over_the_limit_is_refused_and_the_earlier_one_stays(packed: Path, tmp_path: Path) -> None:
    pack_draft = script("pack_draft")
    (tmp_path / "weights").write_bytes(b"x" * (pack_draft.LIMIT + 1))
    with pytest.raises(InputError, match="20 MB"):
        pack_draft.check_size(tmp_path)
    pack_draft.check_size(packed)


def test_the_name_goes_where_a_folder_goes(
    held: Path, run_folder: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ("--target", str(tiny_target), "--json")
    assert draft_folder("shipped") == held and draft_folder("./shipped") == Path("shipped")
    status, out, _ = run(capsys, "inspect", "shipped", "--json")
    seen = json.loads(out)
    assert status == 0 and seen["kind"] == "draft" and seen["findings"] == []
    assert seen["path"] == str(held) and seen["card"]["figures"]["test"]["steps"] == 3
    captures = str(run_folder / "captures")
    status, out, _ = run(capsys, "evaluate", "--draft", "shipped", "--captures", captures, "--steps", "3", *target)
    assert status == 0 and json.loads(out)["accept_length_walk"] == seen["card"]["figures"]["test"]["accept_length"]
    status, out, _ = run(capsys, "export", "--draft", "shipped", "--out", str(tmp_path / "e"), "--json")
    assert (
        status == 0 and (tmp_path / "e" / "model.safetensors").read_bytes() == (held / "model.safetensors").read_bytes()
    )
    status, out, _ = run(capsys, "check", "--draft", "shipped", "--engine", "vllm@0.32.0", "--json")
    assert json.loads(out)["checks"][0]["status"] == "pass"
    trace = ("--out", str(tmp_path / "t"), "--prompt", "hi", "--max-new-tokens", "4")
    assert run(capsys, "trace", "--draft", "shipped", *trace, *target)[0] == 0
    words = ("--prompts", "test", "--limit", "1", "--max-new-tokens", "4", "--precision", "float32", "--num-steps", "1")
    status, out, _ = run(capsys, "bench", "--draft", "shipped", *words, *target)
    assert status == 0 and json.loads(out)["identical_outputs"] is True


def test_a_run_goes_on_from_it(held: Path, run_folder: Path, tiny_target: Path, tmp_path: Path) -> None:
    settings = TrainSettings(start_from="shipped", epochs=0.5, batch_tokens=64, precision="float32", evaluate_every=0)
    named = TargetSettings(name=str(tiny_target))
    manifest = train(run_folder / "captures", tmp_path / "draft", settings, target=named)
    assert torch.equal(load_draft(tmp_path / "draft")[0].d2t, load_draft(held)[0].d2t)
    card = json.loads((held.parent / "card.json").read_text())
    assert manifest.facts["start"] == card["sha256"]
    pack_draft = script("pack_draft")
    start = pack_draft.training_facts(tmp_path / "draft", tmp_path / "draft" / manifest.facts["draft"])["start"]
    assert start == {"sha256": card["sha256"], **{key: card[key] for key in ("training", "answers", "commit")}}
    assert pack_draft.described({"config.json": "0"}) == {"sha256": {"config.json": "0"}}


def test_it_is_the_default_on_its_target_alone_and_said(
    held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, words = chosen_draft(None, False, DEFAULT)
    assert folder == held and words is not None and "comes with Eyas (accept length" in words and "--plain" in words
    assert chosen_draft("d", False, DEFAULT) == (Path("d"), None)
    assert chosen_draft(None, True, DEFAULT) == (None, None)
    assert chosen_draft(None, False, "other") == (None, None)
    with pytest.raises(InputError, match="both, with d"):
        chosen_draft("d", True, DEFAULT)
    for command, plain in (("bench", ("--plain", "--ngram", "3")), ("chat", ("--plain",))):
        flags = ((), plain)
        reads = [json.loads(run(capsys, command, *more, "--plan", "--json")[1])["reads"] for more in flags]
        assert str(held) in reads[0] and str(held) not in reads[1]
    launch = prepare(recipe_of(()), planning=True)
    assert launch.command.draft == str(held) and any("comes with Eyas" in note for note in launch.command.notes)
    assert prepare(recipe_of(("serve.plain=true",)), planning=True).command.draft is None
    named = recipe_of(("serve.draft='shipped'",))
    assert prepare(named).command.draft == str(held)


def test_another_target_without_a_draft_is_refused_as_before(
    held: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "bench", "--target", str(tiny_target), "--json")
    assert status == 2 and json.loads(out)["error"]["wanted"] == "a draft, or n-gram drafting"
    with pytest.raises(InputError, match="none given"):
        prepare(recipe_of((f"target.name={str(tiny_target)!r}",)))


def test_a_copy_without_it_says_what_to_do(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "inspect", "shipped", "--json")
    error = json.loads(out)["error"]
    assert status == 2 and error["got"] == "none in this copy of Eyas" and error["next"].startswith("make shipped")
    folder, words = chosen_draft(None, False, DEFAULT)
    assert folder is None and words is not None and "make shipped" in words
    assert json.loads(run(capsys, "chat", "--plan", "--json")[1])["reads"] == [DEFAULT]
    with pytest.raises(InputError, match="no draft comes with this copy"):
        prepare(recipe_of(()))
    status, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert status == 0 and found["shipped"]["shipped"]["here"] is False
    assert "make shipped" in {one["what"]: one["next"] for one in found["missing"]}["the shipped draft"]


def test_doctor_says_its_figures_and_provenance(held: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "doctor", "--json")[1])["shipped"]["shipped"]
    assert found["here"] is True and found["figures"].startswith("accept length") and found["answers"] == 8
    assert found["commit"] and found["steps"] > 0


def test_a_card_that_cannot_be_read_is_an_error_with_its_next_step(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"format": 1}')
    with pytest.raises(InputError, match="a draft's card"):
        read_card(tmp_path / "draft")


def test_the_package_takes_the_folder_along() -> None:
    """The wheel holds all of src/eyas that git does not ignore: no file of the draft is ignored."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert project["targets"]["wheel"] == {"packages": ["src/eyas"]}
    names = ("draft/config.json", "draft/model.safetensors", "evaluate/result.json", "card.json", "log.jsonl")
    paths = [f"src/eyas/shipped/eagle3/{name}" for name in names]
    ignored = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout == ""


@pytest.mark.skipif(not eyas.shipped.is_here(), reason="this copy of Eyas holds no draft yet")
def test_the_shipped_files_are_what_the_card_says() -> None:
    folder = draft_folder("shipped")
    card = read_card(folder)
    assert card is not None and card.target.name == DEFAULT and card.form.startswith("plain EAGLE-3")
    assert {name: hash_file(folder / name) for name in card.sha256} == card.sha256
    assert sum(path.stat().st_size for path in shipped_root().rglob("*") if path.is_file()) <= 20_000_000
