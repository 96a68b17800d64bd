"""speculators' own training, as benchmarks/bench_recipes.py drives it: its draft comes over whole, and its loss is what
docs/training.md says of its recipe.

`make test-peers` runs this; see test_peers.py."""

import json
import os
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.models.draft import Draft, make_draft
from eyas.training.loss import unroll
from eyas.training.rows import Rows
from peer_cases import Case, Material, batch_of, material, teacher_of, write_case
from test_peers import PYTHON, ROOT

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]
STEPS = 3
CASES = [
    Case(f"recipe{number}", (), STEPS, lengths=(21, 30), prompts=(8, 11 + number), gradients=False)
    for number in range(4)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict, list[float]]]:
    """A folder with the draft after three of four batches, the recipe, and the loss of each."""
    if not PYTHON.is_file():
        pytest.skip(f"no {PYTHON}: make test-peers installs speculators 0.9.0 and specforge 0.2.0")
    folder = tmp_path_factory.mktemp("recipe")
    made = material(CASES[0])
    start, embedding = folder / "start", made.draft.embed_tokens.weight
    counts = torch.arange(len(made.head_VH)) % 7  # some tokens never
    tensors = {"embedding": embedding, "norm": made.norm_H, "head": made.head_VH, "counts": counts}
    save_file({n: t.detach().clone() for n, t in tensors.items()}, f"{start}.safetensors")
    start.with_suffix(".json").write_text(json.dumps(CASES[0].config.model_dump(mode="json")))
    for case in CASES:
        write_case(folder, case, beside(case, made, made.draft))
    lines = [str(folder / f"{case.name}.safetensors") for case in CASES]
    lines.insert(3, f"save {folder / 'draft.safetensors'}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [PYTHON, ROOT / "benchmarks/recipe_peer.py", start, "0", "400"],
        env=environment | {"EYAS_BENCH_THREADS": "1"},
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    recipe, *answers = map(json.loads, done.stdout.splitlines())
    yield folder, recipe, [answer["loss"] for answer in answers if answer]


def beside(case: Case, first: Material, draft: Draft) -> Material:
    """Other documents, the same target, and the draft's vocabulary."""
    made = material(case)
    made.head_VH, made.norm_H = first.head_VH, first.norm_H
    made.draft.d2t, made.draft.t2d = draft.d2t, draft.t2d
    return made


@torch.no_grad()
def their_loss(draft: Draft, case: Case, made: Material) -> float:
    """Row t at step s where token t + 1 + s is in the mask, whatever the teacher's choice: mean divergence, summed over
    steps without decay."""
    batch, teacher = batch_of(case, made), teacher_of(made)
    mask_T = torch.cat([one.mask_L for one in made.documents]).bool()
    starts, total = batch.rows.starts, len(batch.ids_T)
    ends = torch.cat([torch.full((b - a,), b) for a, b in pairwise(starts)])
    index = [torch.nonzero(torch.arange(total) + 1 + step < ends)[:, 0] for step in range(case.steps)]
    inside = [index[0], *(torch.searchsorted(before, now) for before, now in pairwise(index))]
    rows = Rows(starts, batch.rows.positions_T, tuple(index), tuple(inside))
    loss = 0.0
    for step, hidden_RH in enumerate(unroll(draft, batch.taps_TA, batch.ids_T, rows)):
        at_R = index[step] + 1 + step
        teacher_RD = teacher.probabilities(batch.last_hidden_TH[at_R])
        logs_RD = draft.logits(hidden_RH).log_softmax(-1)
        divergence_R = (torch.xlogy(teacher_RD, teacher_RD) - teacher_RD * logs_RD).sum(-1)
        loss += float(divergence_R[mask_T[at_R]].mean())
    return loss


def test_the_draft_that_speculators_trains_is_ours_after_loading_and_its_loss_is_the_one_described(
    trained: tuple[Path, dict, list[float]],
) -> None:
    folder, recipe, losses = trained
    draft = make_draft(CASES[0].config.model_copy(update=recipe["draft"]))
    missing, unexpected = draft.load_state_dict(load_file(folder / "draft.safetensors"), strict=False)
    assert missing == ["embed_tokens.weight"] and not unexpected
    first, last = material(CASES[0]), CASES[3]
    draft.share_embedding(first.draft.embed_tokens.weight)
    assert len(losses) == 4
    assert their_loss(draft, last, beside(last, first, draft)) == pytest.approx(losses[3], rel=1e-5)


def test_the_recipe_is_the_one_that_the_documentation_tells(trained: tuple[Path, dict, list[float]]) -> None:
    recipe = trained[1]
    assert recipe["draft"] == {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": True,
        "sliding_window": 2048,
    }
    wanted = {
        "loss_fn": "kl_div",
        "ttt_steps": 3,
        "ttt_step_loss_decay": 1.0,
        "optimizer": "muon",
        "lr": 1e-3,
        "muon_lr": 1e-3,
        "weight_decay": 0.01,
        "muon_weight_decay": 0.1,
        "muon_momentum": 0.95,
        "muon_adjust_lr_fn": "match_rms_adamw",
        "scheduler_type": "linear",
        "warmup_steps": 4,
    }
    assert {name: recipe[name] for name in wanted} == wanted


def test_their_head_and_the_target_stay_as_they_are(trained: tuple[Path, dict, list[float]]) -> None:
    draft, start = load_file(trained[0] / "draft.safetensors"), load_file(trained[0] / "start.safetensors")
    assert torch.equal(draft["lm_head.weight"], start["head"][draft["t2d"]])
    assert draft["t2d"].sum() == CASES[0].config.draft_vocab_size
    assert draft["t2d"][start["counts"] > 3].all() and not draft["t2d"][start["counts"] == 0].all()
