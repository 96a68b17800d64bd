"""Identify names every boundary by numbers and says unknown rather than guess; the teacher's norm state is seen."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from eyas.models.dequantise import from_fp8_rows
from eyas.models.target import Target, load_target
from eyas.wiring.heatmap import colour, heatmap
from eyas.wiring.identify import NORMED, identify, identify_taps, usable_rows
from eyas.wiring.reference import final_normed, reference_boundaries
from eyas.wiring.tap_findings import tap_findings
from eyas.wiring.teacher import norm_state, teacher_divergence
from tiny import LAYERS

PROBE = [1, *range(40, 120, 2), *range(119, 60, -3)]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(str(tiny_target))


@pytest.fixture(scope="module")
def reference(target: Target) -> list[torch.Tensor]:
    return reference_boundaries(target, PROBE)


def test_the_reference_is_hidden_states_but_for_the_last_which_is_before_the_norm(
    target: Target, reference: list[torch.Tensor]
) -> None:
    with torch.inference_mode():
        hidden = target.model(torch.tensor([PROBE]), output_hidden_states=True).hidden_states
    assert len(reference) == LAYERS + 1
    for boundary in range(LAYERS):
        assert torch.equal(reference[boundary], hidden[boundary][0])
    assert not torch.equal(reference[LAYERS], hidden[LAYERS][0])
    assert torch.equal(final_normed(target, reference[LAYERS]), hidden[LAYERS][0])


@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("boundary", [NORMED, *range(LAYERS + 1)])
def test_every_boundary_is_named_in_every_stored_precision(
    boundary: int, store: torch.dtype, target: Target, reference: list[torch.Tensor]
) -> None:
    normed = final_normed(target, reference[-1])
    block = normed if boundary == NORMED else reference[boundary]
    match = identify(block.to(store), reference, normed)
    assert match.boundary == boundary
    assert match.score < 0.1
    assert match.second_score > 2 * match.score


def test_states_of_nothing_known_are_unknown(target: Target, reference: list[torch.Tensor]) -> None:
    normed = final_normed(target, reference[-1])
    half_way = (reference[3] + reference[4]) / 2
    far = reference[3].roll(5, dims=0)
    noise = torch.randn_like(reference[3]) * reference[3].std()
    input_normed = target.layers[3].input_layernorm(reference[3])
    for block in (half_way, far, noise, input_normed, torch.zeros_like(noise), torch.full_like(noise, torch.inf)):
        match = identify(block, reference, normed)
        assert match.boundary is None
        assert not match.known
        assert match.words().startswith("unknown")


def fp8(states: torch.Tensor) -> torch.Tensor:
    """Through e4m3 with one scale a token."""
    scale = states.abs().amax(dim=-1) / 448.0
    return from_fp8_rows((states / scale[:, None]).to(torch.float8_e4m3fn), scale)


@pytest.fixture(scope="module")
def int8_reference(tiny_target: Path) -> list[torch.Tensor]:
    """The states of the same target with every projection rounded to int8, one scale a row."""
    target = load_target(str(tiny_target))
    for name, parameter in target.model.named_parameters():
        if "proj" in name:
            scale = parameter.abs().amax(dim=1, keepdim=True) / 127.0
            parameter.data = (parameter / scale).round() * scale
    return reference_boundaries(target, PROBE)


@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16, "fp8"])
@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
def test_an_int8_target_is_named_with_its_token_shift(
    shift: int, store: torch.dtype | str, target: Target, reference: list[torch.Tensor], int8_reference: list
) -> None:
    normed, int8_normed = final_normed(target, reference[-1]), final_normed(target, int8_reference[-1])
    for boundary, states in [*enumerate(int8_reference), (NORMED, int8_normed)]:
        stored = fp8(states) if isinstance(store, str) else states.to(store)
        match = identify(stored.roll(-shift, dims=0), reference, normed)
        assert (match.boundary, match.shift, match.normed) == (boundary, shift, boundary == NORMED)
        assert match.score < 0.2
        assert match.margin > 2


def test_rows_that_overflowed_do_not_vote(target: Target, reference: list[torch.Tensor]) -> None:
    block = reference[5].clone()
    block[::3] = torch.inf
    assert identify(block, reference, final_normed(target, reference[-1])).boundary == 5


def test_a_reference_that_stops_early_names_what_it_holds(reference: list[torch.Tensor]) -> None:
    assert identify(reference[3], reference[:6], None).boundary == 3
    assert identify(reference[7], reference[:6], None).boundary is None


def test_repeated_tokens_leave_an_embedding_shift_unknown(reference: list[torch.Tensor]) -> None:
    same = [
        state[:1].expand(40, -1) + torch.arange(40.0)[:, None] * (0.0 if b == 0 else 0.01)
        for b, state in enumerate(reference[:4])
    ]
    assert identify(same[0], same, None).boundary is None


DECLARED = (2, 4, 5)


def found(blocks: list[int], shift: int, target: Target, reference: list[torch.Tensor]) -> list[tuple[str, str, str]]:
    """Codes, expected and found of taps that hold `blocks`, moved by `shift`, declared as DECLARED."""
    normed = final_normed(target, reference[-1])
    states = [normed if block == NORMED else reference[block] for block in blocks]
    matches = identify_taps(torch.cat(states, dim=-1).roll(-shift, dims=0), reference, normed)
    return [(one.code, one.expected, one.found) for one in tap_findings(matches, DECLARED, LAYERS)]


def test_each_kind_of_wrong_tap_has_its_code(target: Target, reference: list[torch.Tensor]) -> None:
    assert found([2, 4, 5], 0, target, reference) == []
    assert found([2, 4, 6], 0, target, reference) == [("tap_offset", "boundary 5 of 8", "boundary 6")]
    assert found([0, 4, 5], 0, target, reference) == [("tap_embedding", "boundary 2 of 8", "boundary 0")]
    assert found([2, 4, NORMED], 0, target, reference) == [
        ("tap_post_norm", "boundary 5 of 8", "the final-normed last state")
    ]
    assert found([4, 2, 5], 0, target, reference) == [("tap_order", "blocks in the order [2, 4, 5]", "[4, 2, 5]")]
    rows = "row t holds the states of token t"
    assert found([2, 4, 5], 1, target, reference) == [("token_shift", rows, f"{rows}+1")]
    assert found([2, 4, 5], -2, target, reference) == [("token_shift", rows, f"{rows}-2")]
    both = [("tap_order", "blocks in the order [2, 4, 5]", "[5, 4, 2]"), ("token_shift", rows, f"{rows}-1")]
    assert found([5, 4, 2], -1, target, reference) == both


def test_a_finding_says_both_distances_and_the_line_to_type(target: Target, reference: list[torch.Tensor]) -> None:
    normed = final_normed(target, reference[-1])
    matches = identify_taps(torch.cat([reference[2], reference[4], reference[6]], dim=-1), reference, normed)
    (one,) = tap_findings(matches, DECLARED, LAYERS)
    assert one.fix == "eyas capture --boundaries 2,4,5 again, or declare what was captured: boundaries [2, 4, 6]"
    assert one.message.startswith("The block declared as boundary 5 lies 0.000 from boundary 6, and ")
    assert f"and {matches[2].scores[5]:.2f} from boundary 5" in one.message


def test_the_heat_map_is_one_self_contained_picture(target: Target, reference: list[torch.Tensor]) -> None:
    normed = final_normed(target, reference[-1])
    matches = identify_taps(torch.cat([reference[2], reference[6], normed], dim=-1), reference, normed)
    root = ElementTree.fromstring(heatmap(matches, (2, 4, None), title="a < b"))
    space = {"svg": "http://www.w3.org/2000/svg"}
    cells = [cell for cell in root.findall("svg:rect", space) if cell.find("svg:title", space) is not None]
    assert len(cells) == 3 * (LAYERS + 2)
    dark = [cell.find("svg:title", space).text for cell in cells if cell.get("fill") == "#08306b"]
    assert dark == ["boundary 2: 0.000", "boundary 6: 0.000", "the final-normed last state: 0.000"]
    outlined = [cell.find("svg:title", space).text for cell in cells if cell.get("stroke") != "none"]
    assert [title.split(":")[0] for title in outlined] == ["boundary 2", "boundary 4"]
    assert "href" not in ElementTree.tostring(root, encoding="unicode")
    assert (colour(0.0), colour(1.0), colour(float("inf"))) == ("#08306b", "#f7fbff", "#f7fbff")


def test_first_tokens_and_attention_sinks_do_not_vote() -> None:
    states = torch.ones(10, 4)
    states[7] *= 100
    assert usable_rows(states).tolist() == [False] * 4 + [True] * 3 + [False] + [True] * 2


def test_the_teacher_is_right_under_exactly_the_norm_state_it_was_stored_in(
    target: Target, reference: list[torch.Tensor]
) -> None:
    last = reference[-1]
    normed = final_normed(target, last)
    for stored, state in ((last, "before"), (normed, "after")):
        divergence = teacher_divergence(target, stored, last)
        assert divergence[state] == pytest.approx(0.0, abs=1e-5)
        assert norm_state(divergence, "before") == state
        assert norm_state(divergence, "after") == state


def test_a_teacher_of_another_model_is_no_norm_state(target: Target, reference: list[torch.Tensor]) -> None:
    torch.manual_seed(3)
    divergence = teacher_divergence(target, torch.randn_like(reference[-1]), reference[-1])
    assert norm_state(divergence, "before") is None
