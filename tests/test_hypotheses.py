"""Hypotheses: the wiring a draft was made for is named, the right one raises nothing, what loss cannot tell is said.

The target has read the prompt bank for a few seconds, so that states and tokens matter as they do in a real one; one
draft was trained for taps [2, 4, 5], and every fault is planted in its folder or in its captures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.data.shards import CaptureReader
from eyas.errors import InputError
from eyas.models.draft import Draft
from eyas.models.target import Target, load_target
from eyas.models.vocab import target_ids
from eyas.training.evaluate import Tally, add_sample
from eyas.training.teacher import Teacher
from eyas.wiring.hypotheses.compare import Effect, level, paired
from eyas.wiring.hypotheses.load import Parts
from eyas.wiring.hypotheses.measure import STEPS, Rig, moved
from eyas.wiring.hypotheses.run import check_hypotheses
from eyas.wiring.hypotheses.wirings import DECLARED, Facts, Wiring, wirings
from eyas.wiring.static_checks import Check
from tiny import tiny_model
from wiring_lab import (
    Document,
    documents,
    draft_config,
    samples_of,
    save_taught_target,
    taught_draft,
    write_draft,
    write_lab_captures,
)

BOUNDARIES = (2, 4, 5)
Plant = Callable[..., Check]


@dataclass(frozen=True, eq=False)
class Lab:
    target: Target
    draft: Draft
    held: list[Document]
    folder: Path


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("lab")
    target = load_target(str(save_taught_target(folder / "target", tiny_model().config, steps=200)))
    draft = taught_draft(target, documents(target, 400, seed=1), draft_config(target, BOUNDARIES), steps=150)
    return Lab(target, draft, documents(target, 24, seed=2), folder)


@pytest.fixture
def plant(lab: Lab, tmp_path: Path) -> Plant:
    """Check the draft with faults: `declared` config fields, `tensors` put in, captured `boundaries` and shifts, and
    `told`: what the captures say their boundaries are, the draft's by default."""

    def call(
        declared: dict[str, Any] | None = None,
        tensors: dict[str, torch.Tensor] | None = None,
        boundaries: tuple[int, ...] = BOUNDARIES,
        recompute: bool = True,
        told: tuple[int, ...] | None = None,
        **captured: Any,
    ) -> Check:
        folder = write_draft(tmp_path / "draft", lab.draft, lab.target, **(declared or {}))
        if tensors:
            weights = folder / "model.safetensors"
            save_file(load_file(weights) | tensors, weights)
        samples = samples_of(lab.held, boundaries, **captured)
        stated = told or (declared or {}).get("boundaries", BOUNDARIES)
        captures = write_lab_captures(tmp_path / "captures", lab.target, samples, stated)
        return check_hypotheses(lab.target, folder, CaptureReader(captures), recompute)

    return call


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
def test_the_right_wiring_raises_nothing(plant: Plant, precision: str) -> None:
    check = plant(precision=precision)
    assert (check.status, check.findings) == ("pass", [])
    assert check.facts["accept_length"] == check.facts["accept_length_after"] > 1.5


def test_what_loss_cannot_tell_is_listed(plant: Plant) -> None:
    untold = plant().facts["untold"]
    assert {"taps [3, 4, 5]", "taps [2, 3, 5]", "taps [1, 4, 5]"} <= set(untold)
    assert not {"states one token later", "taps in the order [5, 4, 2]", "every position one later"} & set(untold)


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "default_taps_lost": ("tap_offset", {"declared": {"boundaries": (6, 7, 8)}, "boundaries": (6, 7, 8)}),
    "embedding_slipped_in": ("tap_embedding", {"declared": {"boundaries": (0, 2, 4)}, "boundaries": (0, 2, 4)}),
    "blocks_reversed": ("tap_order", {"boundaries": (5, 4, 2)}),
    "blocks_rotated": ("tap_order", {"boundaries": (4, 5, 2)}),
    "states_late": ("token_shift", {"hidden": -1}),
    "states_early": ("token_shift", {"hidden": 1}),
    "tokens_early": ("token_shift", {"token": 1}),
    "tokens_late": ("token_shift", {"token": -1}),
    "labels_twice_shifted": ("token_shift", {"hidden": 1, "token": 1}),
    "residual": ("residual_norm", {"declared": {"norm_before_residual": True}}),
    "feedback": ("feedback_norm", {"declared": {"norm_output": True}}),
    "rope": ("rope_theta", {"declared": {"rope_theta": 100.0}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(plant: Plant, fault: str) -> None:
    code, planted = FAULTS[fault]
    check = plant(**planted)
    assert (check.status, [finding.code for finding in check.findings]) == ("fail", [code]), check.evidence
    assert check.facts["accept_length_after"] > check.facts["accept_length"]


def test_captures_of_other_boundaries_are_named_by_what_they_are(plant: Plant) -> None:
    check = plant(boundaries=(4, 6, 7))
    named = [(finding.code, finding.expected, finding.found) for finding in check.findings]
    wanted = {"2": 4, "4": 6, "5": 7}
    assert named == [("tap_offset", f"boundary {b} of 8", f"boundary {seen}") for b, seen in wanted.items()]
    assert all("or declare what was captured: boundaries [4, 6, 7]" in finding.fix for finding in check.findings)


def test_captures_that_say_what_they_are_make_no_mislabelled_draft(plant: Plant) -> None:
    check = plant(boundaries=(4, 6, 7), told=(4, 6, 7))
    assert [finding.code for finding in check.findings] == 3 * ["tap_offset"]
    assert {finding.fix for finding in check.findings} == {"eyas capture --boundaries 2,4,5 again"}
    assert check.findings[0].message.startswith("The block read by the draft as boundary 2 lies ")


@pytest.mark.parametrize("code", ["d2t_absolute", "d2t_missing", "head_mismatch", "embed_mismatch"])
def test_tables_heads_and_embeddings_that_are_not_the_draft_s_are_named(plant: Plant, lab: Lab, code: str) -> None:
    ids = target_ids(lab.draft.d2t)
    noise = torch.randn(lab.target.embedding.shape, generator=torch.Generator().manual_seed(0))
    planted = {
        "d2t_absolute": {"tensors": {"d2t": ids}},
        "d2t_missing": {"tensors": {"d2t": torch.zeros_like(ids)}},
        "head_mismatch": {"tensors": {"lm_head.weight": lab.target.embedding[ids].contiguous()}},
        "embed_mismatch": {"declared": {"own_embedding": True}, "tensors": {"embed_tokens.weight": noise}},
    }
    assert [finding.code for finding in plant(**planted[code]).findings] == [code]


def test_the_finding_says_both_figures_and_the_line(plant: Plant) -> None:
    (found,) = plant({"boundaries": (0, 2, 4)}, boundaries=(0, 2, 4)).findings
    assert found.expected.startswith("taps [2, 4, 5]: loss 0.")
    assert found.found.startswith("as declared: loss ")
    assert found.fix.startswith("boundaries: [2, 4, 5], capture again, export again")
    assert "[1, 3, 4] for SGLang" in found.fix


def test_without_the_target_s_states_the_rest_is_tried_and_it_is_said(plant: Plant) -> None:
    check = plant(boundaries=(5, 4, 2), recompute=False)
    assert [finding.code for finding in check.findings] == ["tap_order"]
    assert "taps that were not captured: not tried" in check.evidence


def test_an_untrained_draft_shows_nothing_and_is_not_guessed_at(lab: Lab, tmp_path: Path) -> None:
    torch.manual_seed(1)
    fresh = Draft(lab.draft.config)
    fresh.d2t, fresh.t2d = lab.draft.d2t, lab.draft.t2d
    folder = write_draft(tmp_path / "draft", fresh, lab.target)
    captures = write_lab_captures(tmp_path / "captures", lab.target, samples_of(lab.held, BOUNDARIES), BOUNDARIES)
    check = check_hypotheses(lab.target, folder, CaptureReader(captures))
    assert (check.status, check.findings) == ("unknown", [])
    assert "too weak" in check.evidence


def test_a_weak_draft_that_a_later_state_helps_was_not_made_for_it(lab: Lab, tmp_path: Path) -> None:
    weak = taught_draft(lab.target, lab.held[:3], draft_config(lab.target, BOUNDARIES), steps=12)
    folder = write_draft(tmp_path / "draft", weak, lab.target)
    captures = write_lab_captures(tmp_path / "captures", lab.target, samples_of(lab.held, BOUNDARIES), BOUNDARIES)
    check = check_hypotheses(lab.target, folder, CaptureReader(captures))
    tried = {one["wiring"]: one for one in check.facts["wirings"]}
    assert tried["states one token later"]["told"] == "better"
    assert check.findings == []


def test_the_declared_wiring_measures_what_evaluate_does(lab: Lab, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", lab.draft, lab.target)
    samples = samples_of(lab.held[:6], BOUNDARIES)
    outcome = Rig(lab.target, Parts.of(folder), samples, "before").measure(Wiring(DECLARED))
    tally = Tally(STEPS)
    for sample in samples:
        add_sample(tally, lab.draft, sample, Teacher(lab.target, target_ids(lab.draft.d2t), "before"))
    wanted = tally.result(greedy=False)
    assert outcome.accuracy == pytest.approx(wanted["accuracy"], abs=1e-6)
    assert outcome.accept_length == pytest.approx(wanted["accept_length"], abs=1e-5)


def test_too_few_documents_or_other_taps_are_skipped_with_the_reason(lab: Lab, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", lab.draft, lab.target)
    few = write_lab_captures(tmp_path / "few", lab.target, samples_of(lab.held[:2], BOUNDARIES), BOUNDARIES)
    other = write_lab_captures(tmp_path / "other", lab.target, samples_of(lab.held, (2, 4)), (2, 4))
    for captures, why in ((few, "needs 4 captured answers or more, has 2"), (other, "reads 3 taps")):
        check = check_hypotheses(lab.target, folder, CaptureReader(captures))
        assert check.status == "skipped" and why in check.evidence


def test_a_draft_without_its_tensors_is_refused_by_name(lab: Lab, tmp_path: Path) -> None:
    weights = write_draft(tmp_path, lab.draft, lab.target) / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(weights).items() if name != "norm.weight"}, weights)
    with pytest.raises(InputError, match=r"missing or of another shape: norm\.weight"):
        Parts.of(tmp_path)


def test_an_effect_needs_size_and_an_interval_from_documents() -> None:
    document = torch.arange(40) // 10
    better = torch.full((40,), 0.5)
    effect = paired(torch.full((40,), 0.6), better, document)
    assert (effect.nats, effect.better) == (pytest.approx(0.1), True)
    small = paired(torch.full((40,), 0.54), better, document)
    assert small.low > 0 and not small.better and small.untold
    one_document = paired(better + (document == 0), better, document)
    assert one_document.nats == pytest.approx(0.25) and not one_document.better
    few = paired(better + 1, better, document // 2)
    assert few == Effect(1.0, float("-inf"), float("inf"))


def test_a_row_that_one_vocabulary_cannot_say_costs_a_guess_and_that_neither_can_says_nothing() -> None:
    nan = float("nan")
    losses = level({"a": torch.tensor([1.0, nan, nan, 1.0]), "b": torch.tensor([1.0, 1.0, nan, nan])}, guess=5.0)
    assert losses["a"].nan_to_num(-1.0).tolist() == [1.0, 5.0, -1.0, 1.0]
    assert losses["b"].nan_to_num(-1.0).tolist() == [1.0, 1.0, -1.0, 5.0]
    assert paired(losses["a"], losses["b"], torch.arange(4)).nats == pytest.approx((0 + 4 - 4) / 3)


def test_rows_move_within_their_document_and_the_ends_repeat() -> None:
    assert moved(torch.arange(4), 1).tolist() == [1, 2, 3, 3]
    assert moved(torch.arange(4), -2).tolist() == [0, 0, 0, 1]


def test_every_wiring_has_a_name_of_its_own_a_code_and_a_fix(lab: Lab) -> None:
    config = lab.draft.config
    five = config.model_copy(update={"boundaries": (0, 2, 4, 6, 8), "target_num_hidden_layers": 8})
    for one in (config, five, config.model_copy(update={"own_embedding": True, "norm_output": True})):
        tried = wirings(Facts(one, frozenset({"d2t", "t2d"}), 10_000.0, {"rope_type": "llama3", "factor": 8.0}))
        assert len({wiring.name for wiring in tried}) == len(tried)
        assert all(wiring.fix for wiring in tried if wiring.code)
