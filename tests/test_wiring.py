"""Identify names every boundary by numbers and says unknown rather than guess; the teacher's norm state is seen."""

from pathlib import Path

import pytest
import torch
from tiny import LAYERS

from eyas.models.target import Target, load_target
from eyas.wiring.identify import NORMED, identify, usable_rows
from eyas.wiring.reference import final_normed, reference_boundaries
from eyas.wiring.teacher import norm_state, teacher_agreement

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
    shifted = reference[3].roll(1, dims=0)
    noise = torch.randn_like(reference[3]) * reference[3].std()
    for block in (half_way, shifted, noise):
        match = identify(block, reference, normed)
        assert match.boundary is None
        assert not match.known
        assert match.words().startswith("unknown")


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
        agreement = teacher_agreement(target, stored, last)
        assert agreement[state] == 1.0
        assert norm_state(agreement, "before") == state
        assert norm_state(agreement, "after") == state


def test_a_teacher_of_another_model_is_no_norm_state(target: Target, reference: list[torch.Tensor]) -> None:
    torch.manual_seed(3)
    agreement = teacher_agreement(target, torch.randn_like(reference[-1]), reference[-1])
    assert norm_state(agreement, "before") is None
