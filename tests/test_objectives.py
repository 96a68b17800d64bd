"""What a row is scored by, each against autograd; how weights move."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from eyas.models.checkpoint import draft_tensors, load_draft
from eyas.models.vocab import draft_ids
from eyas.recipe import DraftSettings, TargetSettings, TrainSettings, recipe_of
from eyas.training import chunked, loop
from eyas.training.chains import Chains, chains_of
from eyas.training.chunked import CHUNK, ChunkedLoss
from eyas.training.loop import row_weights, train
from eyas.training.loss import ttt_loss
from eyas.training.objectives import LEAST_ALPHA, objective_of
from eyas.training.optimise import iteration_flop, make_optimiser, rounds, trained
from made_captures import made
from test_loss import SliceTeacher, make_documents, make_draft, pack, weights

LOSSES = ("soft_cross_entropy", "reverse_kl", "total_variation", "lk_alpha", "lk_lambda")
ACCEPT_LENGTH = objective_of(TrainSettings(loss="accept_length"))


def plainly(loss: str, logits_CD: Tensor, teacher_CD: Tensor, decay: float = 1.0) -> Tensor:
    """The loss of each row from the words of docs/training.md, for autograd to differentiate."""
    draft_CD = logits_CD.softmax(-1)
    alpha_C = torch.minimum(teacher_CD, draft_CD).sum(-1)
    divergence_C = (teacher_CD * (teacher_CD.log() - draft_CD.log())).sum(-1)
    gives_way = (-decay * alpha_C.detach()).exp()
    return {
        "soft_cross_entropy": -(teacher_CD * draft_CD.log()).sum(-1),
        "reverse_kl": (draft_CD * (draft_CD.log() - teacher_CD.log())).sum(-1),
        "total_variation": 0.5 * (teacher_CD - draft_CD).abs().sum(-1),
        "lk_alpha": -alpha_C.log(),
        "lk_lambda": gives_way * divergence_C + (1 - gives_way) * (1 - alpha_C),
    }[loss]


@pytest.mark.parametrize("loss", LOSSES)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 5), words=st.integers(2, 9), spread=st.floats(0.1, 6.0))
def test_loss_and_slope_of_every_objective_are_autograds(
    loss: str, seed: int, rows: int, words: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(rows, words, generator=generator, dtype=torch.float64)).requires_grad_()
    teacher = (spread * torch.randn(rows, words, generator=generator, dtype=torch.float64)).softmax(-1)
    assume(torch.minimum(teacher, logits.softmax(-1)).sum(-1).min() > LEAST_ALPHA)  # below, the logarithm is cut
    wanted = plainly(loss, logits, teacher, decay=2.0)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), logits)
    objective = objective_of(TrainSettings(loss=loss, lk_decay=2.0))  # type: ignore[arg-type]
    plain = logits.detach()
    found, slope = objective.score(plain, plain.softmax(-1), plain.logsumexp(-1), teacher)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(slope, wanted_slope, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_probability_is_too_small_for_an_objective(loss: str) -> None:
    logits = torch.tensor([[0.0, 300.0, -300.0]])
    for far in ([300.0, -300.0, 0.0], [-400.0, 400.0, 0.0]):
        teacher = torch.tensor([far]).softmax(-1)
        objective = objective_of(TrainSettings(loss=loss))  # type: ignore[arg-type]
        found, slope = objective.score(logits, logits.softmax(-1), logits.logsumexp(-1), teacher)
        assert found.isfinite().all() and slope.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_make_the_gradients_of_all_rows_at_once(loss: str) -> None:
    torch.manual_seed(0)
    rows, hidden, words = 2 * CHUNK + 3, 6, 11
    x, head = torch.randn(rows, hidden, requires_grad=True), torch.randn(words, hidden, requires_grad=True)
    teacher = torch.randn(40, words).softmax(-1)
    where, weight = torch.randint(0, 40, (rows,)), torch.rand(rows)
    truth = torch.randint(0, words, (rows,))
    wanted = (weight * plainly(loss, x @ head.T, teacher[where])).sum()
    gradients = torch.autograd.grad(wanted, (x, head))
    objective = objective_of(TrainSettings(loss=loss))  # type: ignore[arg-type]
    found, _, hits = ChunkedLoss.apply(x, head, teacher, where, truth, weight, torch.float32, objective)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert torch.equal(hits, (x @ head.T).argmax(-1) == truth)
    for got, want in zip(torch.autograd.grad(found, (x, head)), gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_leaves_loss_and_the_rows_gradient_as_they_are() -> None:
    torch.manual_seed(0)
    x, head = torch.randn(CHUNK + 3, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    teacher, where = torch.randn(40, 11).softmax(-1), torch.randint(0, 40, (len(x),))
    rest = where, torch.zeros_like(where), torch.rand(len(x)), torch.float32, objective_of(TrainSettings())
    moved, still = (ChunkedLoss.apply(x, one, teacher, *rest)[0] for one in (head, head.detach()))
    assert torch.equal(moved, still)
    assert torch.equal(torch.autograd.grad(moved, x)[0], torch.autograd.grad(still, x)[0])


def test_products_in_bfloat16_make_the_gradients_of_the_rounded_rows() -> None:
    """What each chunk adds to the head's gradient is widened first."""
    torch.manual_seed(0)
    rows = 2 * CHUNK + 3
    x, head = (torch.randn(size, 64).bfloat16().float().requires_grad_() for size in (rows, 11))
    teacher, where = torch.randn(40, 11).softmax(-1), torch.randint(0, 40, (rows,))
    wanted = torch.nn.functional.cross_entropy(x @ head.T, teacher[where], reduction="sum")
    gradients = torch.autograd.grad(wanted, (x, head))
    truth, weight = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    objective = objective_of(TrainSettings())
    found, _, _ = ChunkedLoss.apply(x, head, teacher, where, truth, weight, torch.bfloat16, objective)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-3)
    for got, want in zip(torch.autograd.grad(found, (x, head)), gradients, strict=True):
        assert got.dtype == torch.float32
        assert float((got - want).norm() / want.norm()) < 2e-2


def chains_lost(rows: list[tuple[int, int]], alpha_C: Tensor, weights: list[float]) -> Tensor:
    """The weighted sum over (chain, step) rows of 1 - the product of the chain's alphas up to that step."""
    alphas = dict(zip(rows, alpha_C, strict=True))
    lost = torch.zeros((), dtype=alpha_C.dtype)
    for chain, step in rows:
        survival = torch.ones((), dtype=alpha_C.dtype)
        for before in range(step + 1):
            survival = survival * alphas.get((chain, before), torch.zeros(()))
        lost = lost + weights[step] * (1 - survival)
    return lost


def test_a_step_counts_by_what_comes_before_it_and_what_hangs_on_it() -> None:
    """Survival 0.5, 0.4, 0.1; 1 + 0.8 (1 + 0.25) = 2 hangs on the first step, 1.25 on the second, half as often."""
    chains = Chains(torch.zeros(3, dtype=torch.int64), torch.arange(3), 3)
    loss, slope = chains.coupled(slice(0, 3), torch.tensor([0.5, 0.8, 0.25]), torch.ones(3))
    torch.testing.assert_close(loss, torch.tensor([0.5, 0.6, 0.9]))
    torch.testing.assert_close(slope, torch.tensor([2.0, 0.625, 0.4]))


@given(
    kept=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=12),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_the_accept_length_of_chains_in_chunks_has_autograds_gradients(
    kept: list[list[bool]], chunk: int, seed: int
) -> None:
    rows = [(chain, step) for chain, steps in enumerate(kept) for step, here in enumerate(steps) if here]
    generator = torch.Generator().manual_seed(seed)
    x, head = (torch.randn(size, 6, generator=generator).requires_grad_() for size in (len(rows), 11))
    teacher = torch.randn(40, 11, generator=generator).softmax(-1)
    where, truth = (torch.randint(0, most, (len(rows),), generator=generator) for most in (40, 11))
    weights = [1.0, 0.5, 0.25]
    alpha_C = torch.minimum(teacher[where], (x @ head.T).softmax(-1)).sum(-1)
    wanted = chains_lost(rows, alpha_C, weights)
    gradients = torch.autograd.grad(wanted, (x, head), allow_unused=True, materialize_grads=True) if rows else None
    by_step = [torch.tensor([c for c, s in rows if s == step], dtype=torch.int64) for step in range(3)]
    order, chains = chains_of(by_step, torch.arange(len(kept)))
    assert [(c, s) for c, s in zip(chains.chain_C.tolist(), chains.step_C.tolist(), strict=True)] == rows
    assert sorted(order.tolist()) == list(range(len(rows)))
    weight = torch.tensor([weights[step] for _, step in rows])
    with mock.patch.object(chunked, "CHUNK", chunk):
        found, loss, _ = ChunkedLoss.apply(x, head, teacher, where, truth, weight, torch.float32, ACCEPT_LENGTH, chains)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
    assert float((loss * weight).sum()) == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
    if gradients is not None:
        for got, want in zip(torch.autograd.grad(found, (x, head)), gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [*LOSSES, "accept_length"])
def test_every_objective_falls_along_its_own_gradient_through_the_whole_draft(loss: str) -> None:
    """One small step down the gradient lowers the loss by its squared norm, to first order (lk_lambda's weight moves
    too, and no gradient goes through it: there the loss falls, by another amount)."""
    draft, documents, steps = make_draft(), make_documents([9, 7]), 3
    batch = pack(documents, steps)
    objective = objective_of(TrainSettings(loss=loss))  # type: ignore[arg-type]

    def at() -> Tensor:
        by, words = weights(batch, draft, steps, 0.8, "supervised"), draft_ids(draft.t2d)
        return ttt_loss(draft, batch, SliceTeacher(draft), words, by, objective=objective)[0]  # type: ignore[arg-type]

    before = at()
    before.backward()
    squared = sum(float((p.grad**2).sum()) for p in trained(draft).values() if p.grad is not None)
    rate = 1e-3 / squared**0.5
    with torch.no_grad():
        for parameter in trained(draft).values():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
    fallen = float(before.detach() - at().detach())
    assert fallen > 0 if loss == "lk_lambda" else fallen == pytest.approx(rate * squared, rel=0.1)


def test_step_weights_take_the_place_of_the_decay() -> None:
    draft, batch = make_draft(), pack(make_documents([9, 7]), 3)
    decayed = row_weights([batch], draft.t2d, TrainSettings(step_decay=0.5))
    stated = row_weights([batch], draft.t2d, TrainSettings(step_weights=(1.0, 0.5, 0.25)))
    assert decayed == stated
    assert recipe_of(("train.step_weights=1,0.5,0",)).train.weights(3) == (1.0, 0.5, 0.0)


@pytest.mark.parametrize("stated", [(1.0, 0.5), (0.0, 1.0, 1.0), (1.0, -0.1, 1.0)])
def test_step_weights_that_do_not_fit_are_refused(stated: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match="step_weights"):
        TrainSettings(step_weights=stated)


def test_muon_moves_the_matrices_inside_and_adamw_the_rest() -> None:
    draft = make_draft()
    muon, adamw = make_optimiser(draft, TrainSettings(optimiser="muon")).parts
    names = {id(parameter): name for name, parameter in draft.named_parameters()}
    inner = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert inner | rest == set(trained(draft)) and not inner & rest
    assert "fc.weight" in inner and "layers.0.mlp.up_proj.weight" in inner
    assert {"lm_head.weight", "norm.weight"} <= rest and "embed_tokens.weight" not in rest


def test_muons_matrices_are_dealt_in_rounds_of_alike_cost() -> None:
    """Those of the default target's draft: fc, query, key, value, output, gate, up, down; the count by hand."""
    assert iteration_flop(576, 1728) == iteration_flop(1728, 576) == 2_675_441_664
    shapes = [(576, 1728), (576, 1152), (192, 1152), (192, 1152), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    dealt = [[tuple(weight.shape) for weight in together] for together in rounds(weights, 3)]
    assert dealt == [
        [(576, 1728), (1536, 576), (1536, 576)],
        [(576, 1536), (576, 1152), (576, 576)],
        [(192, 1152), (192, 1152)],
    ]
    assert [len(together) for together in rounds(weights, 1)] == [1] * 8
    assert rounds([], 4) == []


def test_a_first_muon_step_is_an_orthogonal_one_of_adamws_size() -> None:
    """With match_rms_adamw the update is near orthogonal, scaled by 0.2 sqrt(longer side)."""
    draft = make_draft()
    optimiser = make_optimiser(draft, TrainSettings(optimiser="muon", learning_rate=0.01))
    before = draft.fc.weight.detach().clone()
    torch.manual_seed(1)
    for parameter in trained(draft).values():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    update = (before - draft.fc.weight.detach()) / (0.01 * 0.2 * max(before.shape) ** 0.5)
    assert float(torch.linalg.svdvals(update).min()) > 0.74 and float(torch.linalg.svdvals(update).max()) < 1.26


def test_a_killed_muon_run_resumes_to_the_same_weights(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures, _ = made(tmp_path / "captures", tiny_target, train=4, heldout=1)
    settings = TrainSettings(
        epochs=8, batch_tokens=64, ttt_length=2, save_every=2, precision="float32", optimiser="muon", loss="lk_lambda"
    )
    named, shape = TargetSettings(name=str(tiny_target)), DraftSettings(vocab_size=100)
    train(captures, tmp_path / "whole", settings, shape, named)
    advance = loop.Trainer.advance

    def dying(trainer: loop.Trainer) -> dict:
        if trainer.step == 3:
            raise RuntimeError("killed")
        return advance(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "advance", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(captures, tmp_path / "cut", settings, shape, named)
    train(captures, tmp_path / "cut", settings, shape, named)
    one, other = (draft_tensors(load_draft(tmp_path / folder)[0]) for folder in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
