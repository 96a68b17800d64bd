"""All stages on a tiny target, by the command that people type; run again, all is skipped and nothing changes."""

import json
from pathlib import Path

import pytest

from eyas.cli import main
from tiny import save_tiny_target

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

    second = run(capsys, recipe, out)
    assert all(stage["skipped"] for stage in second["stages"])
    for key in ("evaluate", "check", "bench", "draft", "acceptance_parity"):
        assert second[key] == first[key]


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
    ],
)
def test_what_a_late_stage_would_refuse_is_said_before_the_first(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, part: str
) -> None:
    recipe, out = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(RECIPE.format(target=tiny_target))
    if "four" in setting:
        setting = setting.format(four=save_tiny_target(tmp_path / "four", layers=4))
    with pytest.raises(SystemExit) as caught:
        main(["run", str(recipe), "--out", str(out), "--set", setting, "--json"])
    assert caught.value.code == 2
    assert part in " ".join(json.loads(capsys.readouterr().out)["error"].values())
    assert not out.exists()


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
