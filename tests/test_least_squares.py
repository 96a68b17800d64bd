"""The start in closed form, against the equations that it solves; `fc` moves in units of what it reads."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eyas.data.shards import CaptureReader
from eyas.models.vocab import target_ids
from eyas.recipe import DraftSettings, EvaluateSettings, TargetSettings, TrainSettings
from eyas.run import Manifest
from eyas.training.evaluate import evaluate
from eyas.training.initialise import draft_config, new_draft
from eyas.training.least_squares import Moments, guess_size, moments_of, solve, start_from_least_squares
from eyas.training.loop import train
from eyas.training.loss import unroll
from eyas.training.optimise import QUINTICS, Muon, make_optimiser, orthogonal
from eyas.training.rows import supervise
from eyas.training.teacher import Teacher
from made_captures import BOUNDARIES, made
from test_loss import make_draft

WIDTH, HIDDEN, ROWS = 9, 4, 200
RIDGE = 0.125 * (WIDTH + 2 * HIDDEN) / ROWS


def made_moments(seed: int) -> Moments:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(WIDTH + 2 * HIDDEN, WIDTH + 2 * HIDDEN, generator=generator, dtype=torch.float64)
    joined = torch.randn(ROWS, WIDTH + 2 * HIDDEN, generator=generator, dtype=torch.float64) @ mixed
    return Moments(joined.T @ joined / ROWS, torch.ones(WIDTH), ROWS, WIDTH)


def damped_blocks(moments: Moments) -> Tensor:
    """The moments of [x, e] with the ridge of each on its own diagonal."""
    both = moments.product[: WIDTH + HIDDEN, : WIDTH + HIDDEN].clone()
    sizes = both.diagonal().clone()
    both.diagonal()[:WIDTH] += RIDGE * sizes[:WIDTH].mean()
    both.diagonal()[WIDTH:] += RIDGE * sizes[WIDTH:].mean()
    return both


@given(seed=st.integers(0, 10_000))
def test_at_full_rank_it_is_the_ridge_solution_of_taps_and_token_together(seed: int) -> None:
    moments = made_moments(seed)
    fc, read, write = solve(moments, torch.eye(HIDDEN, dtype=torch.float64), 6)
    wanted = torch.linalg.solve(damped_blocks(moments), moments.product[: WIDTH + HIDDEN, WIDTH + HIDDEN :])
    assert read.shape == (4, 6) and write.shape == (6, 4)
    torch.testing.assert_close(torch.cat([fc, read @ write]), wanted, rtol=1e-6, atol=1e-8)


@given(seed=st.integers(0, 10_000), rank=st.integers(1, 3))
def test_no_other_factors_of_the_rank_cost_the_logits_less(seed: int, rank: int) -> None:
    moments = made_moments(seed)
    head = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    metric = head.T @ head / 12
    known = metric + 1e-3 * metric.diagonal().mean() * torch.eye(HIDDEN, dtype=torch.float64)
    both, cross = damped_blocks(moments), moments.product[: WIDTH + HIDDEN, WIDTH + HIDDEN :]

    def cost(fc: Tensor, read: Tensor, write: Tensor) -> Tensor:
        map_ = torch.cat([fc, read @ write])
        return torch.trace((map_.T @ both @ map_ - 2 * map_.T @ cross) @ known)

    found = solve(moments, metric, rank)
    least = cost(*found)
    slopes = torch.autograd.grad(cost(*(part.requires_grad_() for part in found)), found)
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-6 * max(1.0, float(least.abs()))
    generator = torch.Generator().manual_seed(seed + 2)
    for _ in range(5):
        other = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in found]
        best = torch.linalg.solve(both[:WIDTH, :WIDTH], cross[:WIDTH] - both[:WIDTH, WIDTH:] @ other[1] @ other[2])
        assert cost(best, *other[1:]) >= least


def test_moments_are_of_the_rows_before_supervised_tokens(tmp_path: Path, tiny_target: Path) -> None:
    folder, target = made(tmp_path / "captures", tiny_target, train=3, heldout=0)
    samples = CaptureReader(folder)
    draft = new_draft(
        target, draft_config(target, BOUNDARIES, DraftSettings(vocab_size=100)), torch.arange(259), "target", 0
    )
    teacher = Teacher(target, target_ids(draft.d2t), "before")
    moments = moments_of(draft, teacher, samples, [0, 1, 2])
    assert moments is not None
    assert moments.rows == sum(int(samples.mask(number).sum()) for number in range(3))
    torch.testing.assert_close(moments.of("x", "x").diagonal().mean(), torch.tensor(1.0).double(), rtol=0.5, atol=0)
    torch.testing.assert_close(moments.of("e", "e").diagonal().mean(), torch.tensor(1.0).double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [{}, {"fc_norm": False}, {"block": "qwen3"}, {"norm_output": True}])
def test_a_draft_guesses_right_before_its_first_step(tmp_path: Path, sharp_target: Path, shape: dict) -> None:
    folder, _ = made(tmp_path / "captures", sharp_target, train=24, heldout=0)
    named, shaped = TargetSettings(name=str(sharp_target)), DraftSettings(vocab_size=259, **shape)
    right = {}
    for start in ("target", "least_squares"):
        still = TrainSettings(
            epochs=0.2, batch_tokens=64, learning_rate=1e-9, evaluate_every=0, precision="float32", initialise=start
        )
        train(folder, tmp_path / start, still, shaped, named)
        right[start] = evaluate(tmp_path / start, folder, EvaluateSettings(steps=1), named, split="train")
    assert right["least_squares"]["accuracy"][0] > right["target"]["accuracy"][0] + 0.1


def test_the_size_of_a_guess_is_that_of_what_it_gives() -> None:
    """x = 2 in every row, no token seen, y guessed as 3 x: 6; nothing guessed has no size to divide by."""
    moments = Moments(torch.diag(torch.tensor([4.0, 0.0, 1.0])).double(), torch.ones(1).double(), rows=9, width=1)
    one = torch.ones(1, 1).double()
    assert guess_size(moments, 3 * one, one) == 6.0
    assert guess_size(moments, 0 * one, one) == 1.0


def test_what_is_fed_back_at_the_start_is_h_itself_also_where_it_is_normed(tmp_path: Path, sharp_target: Path) -> None:
    """Up to its size from row to row: so a later step means what the first one did."""
    folder, target = made(tmp_path / "captures", sharp_target, train=24, heldout=0)
    samples, numbers = CaptureReader(folder), list(range(24))
    drafts = []
    for normed in (False, True):
        shape = DraftSettings(vocab_size=259, norm_output=normed)
        draft = new_draft(target, draft_config(target, BOUNDARIES, shape), torch.arange(259), "least_squares", 0)
        teacher = Teacher(target, target_ids(draft.d2t), "before")
        start_from_least_squares(draft, teacher, samples, numbers, seed=0)
        drafts.append(draft)
    assert drafts[0].norm.weight.std() > 0.01, "the target's norm is no mere factor"
    sample = samples.read(0)
    rows = supervise(sample.loss_mask_T, [len(sample.ids_T)], steps=1)
    with torch.no_grad():
        plain, normed = (unroll(draft, sample.taps_TA, sample.ids_T.long(), rows)[0] for draft in drafts)
        torch.testing.assert_close(normed, plain)
        torch.testing.assert_close(drafts[1].logits(normed), drafts[0].logits(plain), rtol=1e-4, atol=1e-4)
        fed = drafts[1].feedback(normed)
    assert torch.cosine_similarity(fed, normed, dim=-1).min() > 0.9999
    sizes = fed.norm(dim=-1) / normed.norm(dim=-1)
    assert 0.8 < sizes.median() < 1.25


def test_two_starts_of_one_seed_are_the_same(tmp_path: Path, tiny_target: Path) -> None:
    folder, target = made(tmp_path / "captures", tiny_target, train=4, heldout=0)
    samples = CaptureReader(folder)
    config = draft_config(target, BOUNDARIES, DraftSettings(vocab_size=100))
    made_twice = []
    for _ in range(2):
        draft = new_draft(target, config, torch.arange(259), "least_squares", 0)
        unit_A = start_from_least_squares(
            draft, Teacher(target, target_ids(draft.d2t), "before"), samples, [0, 1, 2, 3], seed=0
        )
        made_twice.append([unit_A, *(parameter.detach() for parameter in draft.parameters() if not parameter.is_meta)])
        torch.rand(3)
    assert all(torch.equal(one, other) for one, other in zip(*made_twice, strict=True))


def test_latent_attention_starts_from_the_targets_head_alone(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = made(tmp_path / "captures", tiny_target, train=4, heldout=0)
    settings = TrainSettings(epochs=0.5, batch_tokens=64, evaluate_every=0, precision="float32")
    named = TargetSettings(name=str(tiny_target))
    manifest: Manifest = train(folder, tmp_path / "draft", settings, DraftSettings(vocab_size=100, block="mla"), named)
    assert manifest.facts["steps"] > 0
    assert "starts from the target's head alone" in capsys.readouterr().err


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_fc_moves_as_if_it_read_taps_divided_by_their_units(optimiser: str, decay: float) -> None:
    settings = TrainSettings(optimiser=optimiser, learning_rate=0.01, weight_decay=decay)  # type: ignore[arg-type]
    unit = torch.linspace(0.1, 30.0, make_draft().fc.in_features)
    in_units, divided = make_draft(), make_draft()
    with torch.no_grad():
        divided.fc.weight.copy_(in_units.fc.weight * unit)
    ours, plain = make_optimiser(in_units, settings, unit), make_optimiser(divided, settings)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        slope = torch.randn(in_units.fc.weight.shape, generator=generator)
        in_units.fc.weight.grad, divided.fc.weight.grad = slope * unit, slope.clone()
        ours.gradient_in_units()
        ours.step()
        plain.step()
    torch.testing.assert_close(in_units.fc.weight * unit, divided.fc.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_weight_decays_by_the_same_share_whatever_its_unit(optimiser: str) -> None:
    settings = TrainSettings(optimiser=optimiser, learning_rate=0.01, weight_decay=0.1)  # type: ignore[arg-type]
    draft = make_draft()
    before, unit = draft.fc.weight.detach().clone(), torch.ones(draft.fc.in_features)
    unit[1], unit[2] = 0.1, 10.0
    moved = make_optimiser(draft, settings, unit)
    for parameter in draft.parameters():
        parameter.grad = torch.zeros_like(parameter)
    moved.step()
    torch.testing.assert_close(draft.fc.weight.detach(), before * 0.999)


@pytest.mark.parametrize(("method", "rest"), [("eagle3", set()), ("peagle", {3})])
def test_only_matrices_decay(method: str, rest: set[int]) -> None:
    draft = make_draft(method=method, mask_token_id=0)
    groups = make_optimiser(draft, TrainSettings(weight_decay=0.1)).param_groups
    assert {one.dim() for group in groups if group["weight_decay"] == 0.1 for one in group["params"]} == {2}
    assert {one.dim() for group in groups if group["weight_decay"] == 0.0 for one in group["params"]} == {1, *rest}


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3)])
def test_an_orthogonal_step_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert float(values.min()) > 0.74 and float(values.max()) < 1.26


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_what_is_small_beside_one_direction_is_moved_as_far(dtype: torch.dtype, size: float) -> None:
    """As in a gradient: one singular value is most of the norm, the others are 0.004 to 0.1 of it."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(96, 96))[0] for _ in range(2))
    singular = torch.cat([torch.ones(1), torch.logspace(-1, -2.4, 95)])
    moved = orthogonal(size * (u * singular) @ v.T, dtype).float()
    along = (u.T @ moved @ v).diagonal()
    assert float(along.min()) > 0.7 and float(along.max()) < 1.3
    assert float((moved - u @ v.T).norm()) < 0.25 * 96**0.5


def test_no_gradient_moves_nothing() -> None:
    assert not orthogonal(torch.zeros(3, 4)).any()


def test_the_quintics_bring_a_thousandfold_range_to_one_and_bear_five_percent_too_much() -> None:
    values = torch.logspace(math.log10(0.003), math.log10(1.05), 100_001, dtype=torch.float64)
    for a, b, c in QUINTICS:
        values = a * values + b * values**3 + c * values**5
    assert float(values.min()) > 0.743 and float(values.max()) < 1.257


def test_muon_keeps_torchs_momentum_and_moves_along_what_svd_makes_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator)
    slopes = [torch.randn(6, 4, generator=generator) for _ in range(3)]
    expected, momentum = start.clone(), torch.zeros(6, 4)
    for slope in slopes:
        momentum = 0.95 * momentum + 0.05 * slope
        u, _, vh = torch.linalg.svd(0.05 * slope + 0.95 * momentum, full_matrices=False)
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * 0.2 * 6**0.5 * (u @ vh)
    made_by: list[Callable[..., torch.optim.Optimizer]] = [
        Muon,
        partial(Muon, dtype=torch.bfloat16),
        torch.optim.Muon,
    ]
    for kind in made_by:
        weight = torch.nn.Parameter(start.clone())
        muon = kind([weight], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for slope in slopes:
            weight.grad = slope.clone()
            muon.step()
        torch.testing.assert_close(muon.state[weight]["momentum_buffer"], momentum)
        assert float((weight.detach() - expected).norm()) < 0.26 * float((start - expected).norm())
