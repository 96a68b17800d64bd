"""Of a target larger than memory, teacher, parity, vocabulary and origin are checked by its two ends alone."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.data.shards import Sample
from eyas.models.draft import Draft
from eyas.models.streaming import plan as planning
from eyas.models.streaming.ends import Ends
from eyas.models.target import Target, load_target
from eyas.models.vocab import build_vocab
from eyas.wiring.check import check
from eyas.wiring.static_checks import reference_plan
from made_captures import captured, greedy_answer, write_captures
from sparse import KIMI_K2, kimi_k2_tensors, save_sparse
from wiring_lab import draft_config, write_draft

Change = Callable[[Target, Sample], Sample]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture(scope="module")
def samples(target: Target) -> list[Sample]:
    """Greedy answers of some thirty tokens."""
    prompts = [[1, *range(40 + start, 60 + start)] for start in (0, 7, 19)]
    texts = [greedy_answer(target, prompt, 30) for prompt in prompts]
    return [captured(target, f"sample-{n}", "heldout", ids, len(prompts[n])) for n, ids in enumerate(texts)]


@pytest.fixture(params=["float32", "bfloat16"])
def draft(target: Target, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    made = Draft(draft_config(target, (2, 4, 5))).eval().to(getattr(torch, request.param))
    made.d2t, made.t2d = build_vocab(torch.ones(target.vocab_size), 80, target.stop_ids)
    return write_draft(tmp_path / "draft", made, target)


def checked(folder: Path, draft: Path, samples: list[Sample], target: Target, **facts: object) -> dict[str, dict]:
    result = check(str(target.folder), write_captures(folder, target, samples, **facts), draft)
    return {one["name"]: one for one in result["checks"]} | {"codes": [one["code"] for one in result["findings"]]}


def test_its_ends_do_what_the_whole_target_does(target: Target) -> None:
    ends, states = Ends.open(target.folder), torch.randn(9, target.hidden_size)
    ids = torch.tensor([3, 250, 258, 0, 17, 99, 120, 5, 64])
    normed = target.final_norm(states)
    assert torch.equal(ends.final_norm(states), normed)
    assert torch.equal(ends.embedding_rows([4, 250]), target.embedding[[4, 250]])
    whole = target.logits(normed).log_softmax(dim=-1)
    logs, argmax = ends.log_probabilities(normed, ids)
    assert torch.allclose(logs, whole.gather(1, ids[:, None])[:, 0], atol=1e-5)
    assert torch.equal(argmax, whole.argmax(dim=-1))


def test_a_head_read_in_pieces_is_the_head(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.models.streaming.ends.PIECE", 50)
    states, ids = torch.randn(9, target.hidden_size), torch.arange(9) * 30
    whole = target.logits(states).log_softmax(dim=-1)
    logs, argmax = Ends.open(target.folder).log_probabilities(states, ids)
    assert torch.allclose(logs, whole.gather(1, ids[:, None])[:, 0], atol=1e-5)
    assert torch.equal(argmax, whole.argmax(dim=-1))


def test_right_captures_and_a_right_draft_pass_what_can_be_checked(
    target: Target, samples: list[Sample], draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SHARE_OF_MEMORY", 0.0)
    found = checked(tmp_path / "captures", draft, samples, target)
    assert found["codes"] == []
    for name in ("captures", "origin", "tap identity", "teacher", "TTT parity", "vocabulary"):
        assert found[name]["status"] == "pass", found[name]
    for name in ("hypotheses", "acceptance"):
        assert found[name]["status"] == "skipped"
        assert "larger" in found[name]["evidence"]


def renormed(target: Target, sample: Sample) -> Sample:
    return replace(sample, last_hidden_TH=target.final_norm(sample.last_hidden_TH))


def same(target: Target, sample: Sample) -> Sample:
    return sample


def shifted(target: Target, sample: Sample) -> Sample:
    return replace(sample, last_hidden_TH=sample.last_hidden_TH.roll(3, dims=0))


@pytest.mark.parametrize(
    ("change", "declared", "code", "fix"),
    [
        (renormed, "before", "teacher_double_normed", "record last_hidden_norm = after"),
        (same, "after", "teacher_not_normed", "record last_hidden_norm = before"),
        (
            shifted,
            "before",
            "target_revision",
            "capture again from the target, weights and precision that will be served",
        ),
        (renormed, "after", None, None),
    ],
)
def test_the_teacher_is_judged_by_head_and_norm_alone(
    change: Change,
    declared: str,
    code: str | None,
    fix: str | None,
    target: Target,
    samples: list[Sample],
    draft: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "SHARE_OF_MEMORY", 0.0)
    written = write_captures(
        tmp_path / "captures", target, [change(target, one) for one in samples], last_hidden_norm=declared
    )
    result = check(str(target.folder), written, draft)
    assert [(one["code"], one["fix"]) for one in result["findings"]] == ([] if code is None else [(code, fix)])


def test_the_plan_says_what_streaming_would_read_and_hold(
    target: Target, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_captures(tmp_path / "captures", target, samples)
    assert reference_plan(str(target.folder), written, None)["reference"]["how"] == "loaded whole, in float32"
    monkeypatch.setattr(planning, "SHARE_OF_MEMORY", 0.0)
    told = reference_plan(str(target.folder), written, None)["reference"]
    assert (told["how"], told["layers"], told["shards"]) == ("streamed, layer by layer", 7, 1)
    assert told["peak_bytes"] > told["layer_bytes"] > 0
    assert reference_plan("no-such-target", None, None) == {}


def test_kimi_k2_is_planned_under_8_gb_without_torch(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "kimi", KIMI_K2, kimi_k2_tensors())
    (tmp_path / "config.json").write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}))
    argv = ["check", "--draft", str(tmp_path / "config.json"), "--target", str(folder), "--plan", "--json"]
    code = (
        "import sys; from eyas.cli import main\n"
        f"try: main({argv!r})\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)["reference"]
    assert (told["how"], told["shards"], told["layers"]) == ("streamed, layer by layer", 64, 60)
    assert 2e9 < told["peak_bytes"] < 8e9
    assert done.stderr.strip() == "False"


def test_a_target_whose_quantisation_is_not_known_is_no_fault_of_the_captures(
    target: Target, samples: list[Sample], tmp_path: Path
) -> None:
    folder = tmp_path / "awq"
    folder.mkdir()
    for path in target.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(config + ', "quantization_config": {"quant_method": "awq", "bits": 4}}')
    written = write_captures(tmp_path / "captures", target, samples)
    result = check(str(folder), written)
    status = {one["name"]: (one["status"], one["evidence"]) for one in result["checks"]}
    assert status["tap identity"][0] == status["teacher"][0] == "skipped"
    assert "quantisation awq 4 bits" in status["tap identity"][1]
    assert result["findings"] == []
