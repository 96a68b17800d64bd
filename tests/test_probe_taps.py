"""The tap probe finds what is linearly there, and judges by the target's own next token."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.captures import capture
from eyas.data.prompts import make_prompts
from eyas.data.responses import respond
from eyas.models.target import load_target
from eyas.recipe import CaptureSettings, PromptsSettings, RespondSettings, TargetSettings

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "probe_taps.py"
HIDDEN = 3


@pytest.fixture(scope="module")
def taps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probe_taps", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["probe_taps"] = module
    spec.loader.exec_module(module)
    return module


def made_probe(taps: ModuleType, seed: int, of: tuple[int, ...]) -> object:
    """Candidates 1 to 5 of noise; the state to come is a map of the boundaries `of` and the token."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    weights = {boundary: noise(HIDDEN, HIDDEN) for boundary in (*of, 6)}

    def rows(count: int) -> object:
        known = noise(count, 6 * HIDDEN)
        wanted = sum(known[:, HIDDEN * (b - 1) : HIDDEN * b] @ weight for b, weight in weights.items())
        return taps.Rows(known, wanted)

    train, heldout = rows(4000), rows(200)
    joined = torch.cat([train.known, train.wanted], dim=1)
    product = joined.T @ joined / len(joined)
    return taps.Probe((1, 2, 3, 4, 5), product, len(joined), heldout, None, None, None, torch.eye(HIDDEN))


@given(seed=st.integers(0, 1000), of=st.sampled_from(list(itertools.combinations(range(1, 6), 2))))
def test_the_boundaries_that_hold_the_state_are_found(taps: ModuleType, seed: int, of: tuple[int, int]) -> None:
    probe = made_probe(taps, seed, of)
    assert taps.grown(probe, 2) == list(of)
    assert probe.unexplained(of) < 1e-3 < probe.unexplained([b for b in (1, 2, 3, 4, 5) if b not in of])


def test_states_are_those_of_a_capture_and_the_last_state_itself_is_right_everywhere(
    taps: ModuleType, tmp_path: Path, tiny_target: Path
) -> None:
    rows = [{"id": f"q{n}", "messages": [{"role": "user", "content": f"word {n}"}]} for n in range(12)]
    (tmp_path / "source.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = TargetSettings(name=str(tiny_target))
    make_prompts(tmp_path / "prompts", PromptsSettings(source=str(tmp_path / "source.jsonl"), train=9, heldout=3))
    settings = RespondSettings(max_new_tokens=12, batch_size=4, precision="float32")
    respond(tmp_path / "prompts", tmp_path / "responses", settings, named)
    out = tmp_path / "taps.json"
    taps.main(["--responses", str(tmp_path / "responses"), "--target", str(tiny_target), "--candidates", "6,7",
               "--count", "2", "--out", str(out)])  # fmt: skip
    report = json.loads(out.read_text())
    assert [row["boundaries"] for row in report["alone"]] == [[2], [4], [5], [6], [7]]
    assert report["default"]["boundaries"] == [2, 4, 5] and len(report["best"]["boundaries"]) == 2
    exact = CaptureSettings(precision="float32", store="float32")
    manifest = capture(tmp_path / "responses", tmp_path / "captures", exact, named)
    target = load_target(str(tiny_target), dtype="float32")
    assert report["heldout_rows"] + report["rows"] == manifest.facts["counts"]["supervised_tokens"]
    state = torch.randn(5, target.hidden_size)
    assert torch.equal(taps.chosen(target, state), target.logits(state).argmax(-1))
