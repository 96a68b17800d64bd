"""All stages on a tiny target, by the command that people type; run again, all is skipped and nothing changes."""

import json
import shutil
from pathlib import Path

import pytest

from eyas.cli import main
from eyas.models.draft import make_draft
from eyas.models.target import load_target
from tiny import save_tiny_target
from wiring_lab import draft_config, write_draft

RECIPE = """
name = "tiny"
[target]
name = "{target}"
[prompts]
train = 48
heldout = 8
[respond]
max_new_tokens = 24
batch_size = 16
precision = "float32"
[capture]
shard_tokens = 4096
precision = "float32"
store = "float32"
[draft]
vocab_size = 128
[train]
epochs = 4
batch_tokens = 1024
precision = "float32"
[bench]
limit = 4
max_new_tokens = 24
equality_limit = 4
precision = "float32"
"""
STAGES = ["prompts", "responses", "captures", "draft", "evaluate", "export", "check", "bench"]


def run(capsys: pytest.CaptureFixture[str], recipe: Path, out: Path) -> dict:
    with pytest.raises(SystemExit) as caught:
        main(["run", str(recipe), "--out", str(out), "--json"])
    assert (caught.value.code or 0) == 0
    return json.loads(capsys.readouterr().out)


def plan(capsys: pytest.CaptureFixture[str], recipe: Path, out: Path, *sets: str) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as caught:
        main(["run", str(recipe), "--out", str(out), *(f"--set={one}" for one in sets), "--plan", "--json"])
    return int(caught.value.code or 0), json.loads(capsys.readouterr().out)


def test_every_stage_runs_agrees_with_the_next_and_is_skipped_the_second_time(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(target=tiny_target))
    first = run(capsys, recipe, out)

    assert [stage["name"] for stage in first["stages"]] == STAGES
    assert not any(stage["skipped"] for stage in first["stages"])
    assert first["check"]["verdict"] == "pass"
    statuses = {one["name"]: one["status"] for one in first["check"]["checks"]}
    for name in ("tap identity", "teacher", "TTT parity", "vocabulary", "export", "acceptance"):
        assert statuses[name] == "pass"
    assert "fail" not in statuses.values()
    assert len(statuses) >= 8, "both engines' loaders are among the checks"
    parity = first["acceptance_parity"]
    assert parity["engine"] == parity["walk"] > 1
    assert parity["texts_equal"] == parity["samples"] == 8
    assert first["evaluate"]["walk_exact"] is True
    assert first["bench"]["identical_outputs"] is True
    assert first["bench"]["divergence"] == 0.0
    low, median, high = (first["bench"]["speedup"][key] for key in ("low", "median", "high"))
    assert low <= median <= high
    assert first["bench"]["speculative"]["accept_length"] == pytest.approx(
        1 + sum(first["bench"]["speculative"]["survival"]), abs=1e-4
    )
    assert sorted(path.name for path in Path(first["draft"]).iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    report = (out / "report.md").read_text()
    for part in ("Speed-up", "accept length", "equal, token for token", "Verdict: pass", str(out)):
        assert part in report

    assert plan(capsys, recipe, out)[1]["stages"] == [{"name": name, "state": "complete"} for name in STAGES]
    second = run(capsys, recipe, out)
    assert all(stage["skipped"] for stage in second["stages"])
    for key in ("evaluate", "check", "bench", "draft", "acceptance_parity"):
        assert second[key] == first[key]

    # what later stages were made from is gone: made anew it would be another, so they are refused before that hour
    shutil.rmtree(out / "captures")
    code, told = plan(capsys, recipe, out)
    assert code == 2 and told["error"]["wanted"] == f"{out / 'captures'}, which {out / 'draft'} was made from"
    for stage in (doomed := ("draft", "evaluate", "check", "bench")):
        assert str(out / stage) in told["error"]["next"]
    shutil.rmtree(out / "draft")
    code, told = plan(capsys, recipe, out)
    assert code == 2 and all(str(out / stage) in told["error"]["next"] for stage in doomed[1:])
    for stage in doomed[1:]:
        shutil.rmtree(out / stage)
    states = {one["name"]: one["state"] for one in plan(capsys, recipe, out)[1]["stages"]}
    assert states == dict.fromkeys(STAGES, "new") | dict.fromkeys(("prompts", "responses"), "complete")
    assert plan(capsys, recipe, out, "train.epochs=2")[1]["changed"]["train.epochs"] == 2.0
    assert "responses.seed" in plan(capsys, recipe, out, "respond.seed=3")[1]["error"]["got"]


def test_what_the_export_would_refuse_is_said_before_the_first_stage(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(target=tiny_target))
    with pytest.raises(SystemExit) as caught:
        main(["run", str(recipe), "--out", str(out), "--set", "draft.norm_before_residual=true", "--json"])
    assert caught.value.code == 2
    assert "sglang" in json.loads(capsys.readouterr().out)["error"]["got"]
    assert not out.exists()


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("prompts.heldout=0", "prompts.heldout"),
        ("bench.prompts=absent.jsonl", "no such file"),
        ("target.name={four}", "capture.boundaries=[1, 2, 3]"),
        ("draft.method=peagle", "peagle"),
        ("draft.method=peagle draft.norm_output=true export.engines=['vllm']", "feeds nothing back"),
        ("draft.method=peagle train.on_policy=true export.engines=['vllm']", "peagle, of draft.method"),
        ("train.start_from=/nowhere", "/nowhere"),
        ("train.start_from={draft}", "captures of the draft's boundaries [2, 4, 6]"),
        ("train.start_from={draft} capture.boundaries=[2,4,6] draft.block=qwen3", "draft.block = 'qwen3'"),
    ],
)
def test_what_a_late_stage_would_refuse_is_said_before_the_first(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, part: str
) -> None:
    recipe, out = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(target=tiny_target))
    if "four" in setting:
        setting = setting.format(four=save_tiny_target(tmp_path / "four", layers=4))
    if "draft}" in setting:
        target = load_target(str(tiny_target))
        draft = make_draft(draft_config(target, (2, 4, 6)))
        setting = setting.format(draft=write_draft(tmp_path / "start", draft, target))
    assert is_refused(capsys, recipe, out, setting.split(" "), part)


def is_refused(capsys: pytest.CaptureFixture[str], recipe: Path, out: Path, sets: list[str], part: str) -> bool:
    """By the run and by its plan, with the same words, and nothing is written."""
    code, planned = plan(capsys, recipe, out, *sets)
    with pytest.raises(SystemExit) as caught:
        main(["run", str(recipe), "--out", str(out), *(f"--set={one}" for one in sets), "--json"])
    assert (code, caught.value.code, json.loads(capsys.readouterr().out)) == (2, 2, planned)
    assert part in " ".join(planned["error"].values())
    return not out.exists()


def test_a_changed_setting_stops_at_its_stage_and_names_it(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(target=tiny_target))
    with pytest.raises(SystemExit):
        main(["prompts", "--out", str(out / "prompts"), "--train", "48", "--heldout", "8", "--seed", "5", "--json"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["run", str(recipe), "--out", str(out), "--json"])
    assert caught.value.code == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "seed" in error["wanted"]
    assert "--out" in error["next"]
