"""The same weights, states and ids through speculators 0.9.0's and specforge 0.2.0's own training and through ours.

`make test-peers` makes their environment and runs this; EYAS_PEERS_PYTHON names its interpreter. Differences are in
float32, the largest absolute one over the largest absolute value of what is compared.
"""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.models.draft import Draft
from eyas.models.vocab import draft_ids
from eyas.recipe import TrainSettings
from eyas.training import blocks
from eyas.training.loop import row_weights
from eyas.training.loss import in_vocabulary, ttt_loss, unroll
from peer_cases import CASES, DECAY, PEAGLE, WINDOW, Material, batch_of, material, teacher_of, write_case

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("EYAS_PEERS_PYTHON", ROOT / ".venv-peers/bin/python"))
BY_NAME = {case.name: case for case in (*CASES, WINDOW, PEAGLE)}
RUNS = [(case.name, run) for case in CASES for run in case.runs]
WITH_GRADIENTS = [(name, run) for name, run in RUNS if BY_NAME[name].gradients]


@cache
def made(name: str) -> Material:
    return material(BY_NAME[name])


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every case and what each peer made of it."""
    if not PYTHON.is_file():
        pytest.skip(f"no {PYTHON}: make test-peers installs speculators 0.9.0 and specforge 0.2.0")
    folder = tmp_path_factory.mktemp("peers")
    for case in BY_NAME.values():
        write_case(folder, case, made(case.name))
    worker = Path(__file__).with_name("peer_worker.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([PYTHON, worker, folder], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def theirs_of(peers: Path, name: str, run: str) -> dict[str, Tensor]:
    return load_file(peers / f"{name}.{run.replace('/', '.')}.safetensors")


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def compare(theirs: dict[str, Tensor], name: str, draft: Draft | None = None, pace: int = 1) -> list[float]:
    """How far our logits are from a peer's at each step, over every supervised row."""
    batch, draft = batch_of(BY_NAME[name], made(name)), draft or made(name).draft
    starts, out = batch.rows.starts, []
    with torch.no_grad():
        hidden = unroll(draft, batch.taps_TA, batch.ids_T, batch.rows, pace)
        for step, (index, states) in enumerate(zip(batch.rows.index, hidden, strict=True)):
            document = torch.searchsorted(torch.tensor(starts), index, right=True) - 1
            pairs = zip(document.tolist(), index.tolist(), strict=True)
            wanted = [theirs[f"logits.{one}.{step}"][row - starts[one]] for one, row in pairs]
            out.append(apart(draft.logits(states), torch.stack(wanted)))
    return out


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_every_step_has_the_peers_logits(peers: Path, name: str, run: str) -> None:
    found = compare(theirs_of(peers, name, run), name)
    assert len(found) == BY_NAME[name].steps
    assert max(found) < 1e-5, found


def test_every_depth_of_a_parallel_chain_has_the_peers_logits(peers: Path) -> None:
    """Of the rows that it drew: nearly all of ours."""
    theirs, batch = theirs_of(peers, "peagle", "speculators/sdpa"), batch_of(PEAGLE, made("peagle"))
    starts, draft = torch.tensor(batch.rows.starts), made("peagle").draft
    with torch.no_grad():
        hidden = unroll(draft, batch.taps_TA, batch.ids_T, batch.rows)
        for depth, (index, states) in enumerate(zip(batch.rows.index, hidden, strict=True)):
            document = torch.searchsorted(starts, index, right=True) - 1
            pairs = zip(document.tolist(), (index - starts[document]).tolist(), strict=True)
            wanted = torch.stack([theirs[f"logits.{one}.{depth}"][row] for one, row in pairs])
            drawn = wanted.isfinite().all(dim=-1)
            assert drawn.float().mean() > 0.8
            assert apart(draft.logits(states)[drawn], wanted[drawn]) < 1e-5, depth


@pytest.mark.parametrize(("name", "run"), WITH_GRADIENTS)
def test_loss_and_gradients_are_the_peers(peers: Path, name: str, run: str) -> None:
    """speculators logs the divergence: cross-entropy less the teacher's entropy, over the rows in the loss of a step.
    SpecForge divides by all rows. Both weigh step s by 0.8 ** s here (the default of speculators is 1)."""
    draft, batch, teacher = made(name).draft, batch_of(BY_NAME[name], made(name)), teacher_of(made(name))
    theirs, peer = theirs_of(peers, name, run), run.split("/")[0]
    denominator = {"speculators": "supervised", "specforge": "all"}[peer]
    settings = TrainSettings(ttt_length=BY_NAME[name].steps, step_decay=DECAY, denominator=denominator)
    weights = row_weights([batch], draft.t2d, settings)
    draft.zero_grad()
    loss, sums = ttt_loss(draft, batch, teacher, draft_ids(draft.t2d), weights)
    loss.backward()
    kept = in_vocabulary(batch.rows, batch.argmax_T, draft.t2d)
    total = 0.0
    for step, (index, keep) in enumerate(zip(batch.rows.index, kept, strict=True)):
        summed = float(sums.loss[step])
        if peer == "speculators":
            teacher_RD = teacher.probabilities(batch.last_hidden_TH[index[keep] + 1 + step])
            summed += float(torch.xlogy(teacher_RD, teacher_RD).sum())
        mean = summed * weights[step]
        assert mean == pytest.approx(
            float(theirs[f"loss.{step}"]) * (DECAY**step if peer == "specforge" else 1), rel=1e-5
        )
        total += mean
    assert total == pytest.approx(float(theirs["loss"]), rel=1e-5)
    gradients = {n: p.grad for n, p in draft.named_parameters() if p.grad is not None}
    assert set(gradients) <= {key.removeprefix("grad.") for key in theirs if key.startswith("grad.")}
    for parameter, gradient in gradients.items():
        assert apart(gradient, theirs[f"grad.{parameter}"]) < 1e-4, parameter


def test_which_rows_each_trains(peers: Path) -> None:
    """Tokens 0..11, the answer is 5..11. What a peer's loss reaches is read off the gradient of its logits.

    Row 4 at step 0 is the first draft that a server makes in this answer; row 9 is the last whose token is in it.
    """

    def trained(run: str) -> list[list[int]]:
        theirs = theirs_of(peers, "rows", run)
        return [theirs[f"trained.0.{step}"].nonzero()[:, 0].tolist() for step in range(3)]

    case = BY_NAME["rows"]
    ours = [index.tolist() for index in batch_of(case, made("rows")).rows.index]
    assert ours == [[4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8], [4, 5, 6, 7]]
    sayable_L = made("rows").draft.t2d[made("rows").documents[0].argmax_L]
    assert trained("speculators/sdpa") == [[4, 5, 6, 7, 8, 9, 10], [3, 4, 5, 6, 7, 8, 9], [2, 3, 4, 5, 6, 7, 8]]
    by_mask = [[5, 6, 7, 8, 9, 10], [4, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8]]
    assert trained("specforge/sdpa") == [
        [row for row in rows if row + 1 + step < 12 and sayable_L[row + 1 + step]] for step, rows in enumerate(by_mask)
    ]


def test_a_document_whose_answer_starts_at_once_is_entered_by_the_one_before(peers: Path) -> None:
    """speculators packs 8 and 12 tokens, answers from 3 and from 1. At step 1 the first document's last row is fed, and
    held against, the second document's first tokens. A prompt of at least `ttt_steps` tokens keeps them apart."""
    theirs = theirs_of(peers, "short_prompt", "speculators/sdpa")
    first = [theirs[f"trained.0.{step}"].nonzero()[:, 0].tolist() for step in range(3)]
    assert first == [[2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]]
    ours = [index[index < 8].tolist() for index in batch_of(BY_NAME["short_prompt"], made("short_prompt")).rows.index]
    assert ours == [[2, 3, 4, 5], [2, 3, 4], [2, 3]]


def test_specforge_feeds_back_before_the_norm_whatever_norm_output_says(peers: Path) -> None:
    """Its `norm_output` (true when absent) is the norm before the head; in the engines and in speculators it is the
    norm of what is fed back."""
    theirs = theirs_of(peers, "fc_norm", "specforge/sdpa")
    draft = material(BY_NAME["fc_norm"]).draft
    draft.config = draft.config.model_copy(update={"norm_output": True})
    first, *later = compare(theirs, "fc_norm", draft)
    assert first < 1e-5
    assert min(later) > 1e-2


def test_speculators_window_stays_where_the_row_is(peers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step s a row sees the step-0 keys above t - window in speculators, above t + s - window here, as served."""
    theirs = theirs_of(peers, "window", "speculators/sdpa")
    first, *later = compare(theirs, "window")
    assert first < 1e-5
    assert min(later) > 1e-3
    moved = blocks.reach
    monkeypatch.setattr(blocks, "reach", lambda window, step: moved(window, 0))
    assert max(compare(theirs, "window")) < 1e-5


def test_a_wrong_wiring_is_seen(peers: Path) -> None:
    """Rotary positions that stand still over the steps, and the residual taken after its norm."""
    theirs = theirs_of(peers, "ttt7", "specforge/sdpa")
    assert min(compare(theirs, "ttt7", pace=0)[1:]) > 1e-3
    draft = material(BY_NAME["ttt7"]).draft
    draft.layers[0].norm_before_residual = True
    assert min(compare(theirs, "ttt7", draft)) > 1e-2
