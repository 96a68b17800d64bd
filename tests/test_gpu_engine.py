"""The GPU script's steps on a CPU: what it would print of graphs."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from eyas.engine.graphs import Recording
from eyas.models.target import load_target
from tiny import save_tiny_target

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_engine.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_engine", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_graphs_are_told_of_and_replayed_texts_are_eager_ones(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(str(save_tiny_target(tmp_path / "t")), dtype="bfloat16")
    recording = Recording(script.call_again, room=300)
    monkeypatch.setattr(script, "WAYS", {"tree": script.WAYS["tree"]})
    prompts = script.prompts_of(target, 1)
    found = script.lossless(target, prompts, 6, recording)["tree"]
    assert (found["self_test"], found["equal"], found["of"]) == (True, 1, 1)
    assert found["graphs"]["target"] > 4 and found["graphs"]["draft"] >= 1
    told = script.speed(target, prompts, 12, recording)
    assert told["graphs"]["target"] > 2 and told["graphs_over_eager_plain"] > 0
    assert told["graphs_over_eager_speculative"] > 0 and told["speedup_at_simulated_3_eager"] > 0


def test_a_recording_that_fails_is_told_of_in_its_place(script: ModuleType, tmp_path: Path) -> None:
    def refuse(step: object) -> None:
        raise RuntimeError("operation not permitted")

    target = load_target(str(save_tiny_target(tmp_path / "t")))
    told = script.speed(target, script.prompts_of(target, 1), 6, Recording(lambda: refuse, room=300))
    assert told["graphs"] == {"target": "operation not permitted", "draft": "operation not permitted"}
