"""The TTT loss and its mask against a brute-force oracle."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.formats.draft_config import DraftConfig, LatentShape
from eyas.models.draft import Draft
from eyas.models.draft import make_draft as new_module
from eyas.models.vocab import build_vocab, draft_ids
from eyas.training.loss import Batch, ttt_loss, unroll
from eyas.training.rows import supervise
from ttt_oracle import Oracle, oracle_loss

VOCAB, HIDDEN, DRAFT_VOCAB = 40, 16, 24
CONFIG = DraftConfig(
    boundaries=(1, 3),
    target_num_hidden_layers=4,
    target_hidden_size=HIDDEN,
    target_model_type="llama",
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    max_position_embeddings=64,
)
LATENT = LatentShape(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
MLA = {"block": "mla", "latent": LATENT, "num_key_value_heads": 4, "head_dim": 4}
PEAGLE = {"method": "peagle", "mask_token_id": 7}
OPTIONS = [
    {},
    {"fc_norm": True},
    {"norm_output": True, "norm_before_fc": True},
    {"norm_before_residual": True},
    {"block": "qwen3"},
    {"rope_theta": 500.0},
    MLA,
    PEAGLE,
    {**PEAGLE, **MLA, "fc_norm": True},
    {**PEAGLE, "block": "qwen3", "norm_before_residual": True, "norm_before_fc": True},
]


class SliceTeacher:
    """A teacher from full logits, softmax over the slice: what `Teacher` does from a last hidden state."""

    def __init__(self, draft: Draft) -> None:
        self.words = torch.arange(draft.config.draft_vocab_size) + draft.d2t

    def probabilities(self, logits_RV: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return logits_RV[:, self.words].softmax(-1)


def make_draft(seed: int = 0, **options: object) -> Draft:
    torch.manual_seed(seed)
    draft = new_module(CONFIG.model_copy(update=options))
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.is_meta:
                continue
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    draft.share_embedding(torch.randn(VOCAB, HIDDEN))
    draft.d2t, draft.t2d = build_vocab(torch.randint(0, 50, (VOCAB,)), DRAFT_VOCAB)
    return draft


def make_documents(lengths: list[int], seed: int = 0) -> list[tuple[Tensor, list[int], list[int], Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in lengths:
        prompt = int(torch.randint(1, length, (), generator=generator)) if length > 1 else 1
        documents.append(
            (
                torch.randn(length, 2 * HIDDEN, generator=generator),
                torch.randint(0, VOCAB, (length,), generator=generator).tolist(),
                [0] * prompt + [1] * (length - prompt),
                3 * torch.randn(length, VOCAB, generator=generator),
            )
        )
    return documents


def pack(documents: list[tuple[Tensor, list[int], list[int], Tensor]], steps: int) -> Batch:
    taps, ids, masks, logits = zip(*documents, strict=True)
    logits_TV = torch.cat(logits)
    return Batch(
        samples=tuple(str(i) for i in range(len(documents))),
        ids_T=torch.tensor([token for document in ids for token in document]),
        taps_TA=torch.cat(taps),
        last_hidden_TH=logits_TV,
        argmax_T=logits_TV.argmax(-1),
        rows=supervise(torch.tensor([bit for mask in masks for bit in mask]), [len(d) for d in ids], steps),
    )


def weights(batch: Batch, draft: Draft, steps: int, decay: float, denominator: str) -> list[float]:
    kept = [int(draft.t2d[batch.argmax_T[i + 1 + s]].sum()) for s, i in enumerate(batch.rows.index)]
    total = batch.ids_T.numel()
    return [decay**s / (total if denominator == "all" else max(kept[s], 1)) for s in range(steps)]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("denominator", ["supervised", "all"])
def test_the_loss_and_its_gradient_equal_the_oracles_over_packed_documents(
    options: dict[str, object], denominator: str
) -> None:
    draft, steps = make_draft(**options), 3
    documents = make_documents([9, 2, 7, 1, 5])
    wanted, counts = oracle_loss(draft, documents, steps, 0.8, denominator)
    wanted.backward()
    wanted_gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad()

    batch = pack(documents, steps)
    row_weights = weights(batch, draft, steps, 0.8, denominator)
    loss, sums = ttt_loss(draft, batch, SliceTeacher(draft), draft_ids(draft.t2d), row_weights)  # type: ignore[arg-type]
    loss.backward()

    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert sums.rows.tolist() == [count["rows"] for count in counts]
    assert sums.kept.tolist() == [count["kept"] for count in counts]
    assert sums.hits.tolist() == [count["hits"] for count in counts]
    gradients = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-3, atol=1e-5, msg=name)


def test_on_policy_a_row_is_followed_while_it_drafts_the_text() -> None:
    """Some tokens are made the ones that a row drafts at step 0, some the ones that the row before drafts at step 1."""
    draft, steps = make_draft(), 3
    words = (torch.arange(DRAFT_VOCAB) + draft.d2t).tolist()
    documents = make_documents([14, 11])
    for taps, ids, _, _ in documents:
        for t in range(len(ids) - 2):
            if t % 3:
                row, step = (t, 0) if t % 3 == 1 else (t - 1, 1)
                logits = Oracle(draft).document(taps[: t + 2], ids[: t + 2], 2)[row, step]
                ids[t + 2] = words[int(logits.argmax())]
    wanted, counts = oracle_loss(draft, documents, steps, 0.8, "supervised", on_policy=True)
    every = oracle_loss(draft, documents, steps, 0.8, "supervised")[1]
    assert counts[0]["rows"] == every[0]["rows"]
    assert all(0 < some["rows"] < all_of["rows"] for some, all_of in zip(counts[1:], every[1:], strict=True))
    wanted.backward()
    wanted_gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad()
    batch = pack(documents, steps)
    row_weights = weights(batch, draft, steps, 0.8, "supervised")
    teacher: Any = SliceTeacher(draft)
    loss, sums = ttt_loss(draft, batch, teacher, draft_ids(draft.t2d), row_weights, on_policy=True)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert sums.rows.tolist() == [count["rows"] for count in counts]
    assert sums.hits.tolist() == [count["hits"] for count in counts]
    for name, p in draft.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, wanted_gradients[name], rtol=1e-3, atol=1e-5, msg=name)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 4),
    options=st.sampled_from([{}, PEAGLE]),
)
def test_every_supervised_row_sees_what_the_oracle_sees(
    lengths: list[int], seed: int, steps: int, options: dict[str, object]
) -> None:
    draft = make_draft(**options)
    documents = make_documents(lengths, seed)
    batch = pack(documents, steps)
    with torch.no_grad():
        hidden = unroll(draft, batch.taps_TA, batch.ids_T, batch.rows)
        oracle = [Oracle(draft).document(taps, ids, steps) for taps, ids, _, _ in documents]
    for step, index in enumerate(batch.rows.index):
        logits = draft.logits(hidden[step])
        for row, found in zip(index.tolist(), logits, strict=True):
            document = max(i for i, start in enumerate(batch.rows.starts[:-1]) if start <= row)
            wanted = oracle[document][row - batch.rows.starts[document], step]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_document_is_trained_the_same_alone_and_packed() -> None:
    draft, documents = make_draft(), make_documents([6, 8, 5], seed=3)
    with torch.no_grad():
        packed = pack(documents, 2)
        together = unroll(draft, packed.taps_TA, packed.ids_T, packed.rows)
        first = 0
        for document in documents:
            batch = pack([document], 2)
            alone = unroll(draft, batch.taps_TA, batch.ids_T, batch.rows)
            inside = (packed.rows.index[1] >= first) & (packed.rows.index[1] < first + len(document[1]))
            torch.testing.assert_close(together[1][inside], alone[1], rtol=1e-5, atol=1e-5)
            first += len(document[1])


def test_the_first_draft_of_an_answer_is_trained_and_nothing_beyond_its_end() -> None:
    """Prompt tokens 0..2, answer tokens 3..6: row 2 is the prompt's last, row 4 predicts the last token."""
    rows = supervise(torch.tensor([0, 0, 0, 1, 1, 1, 1]), [7], 4)
    assert [index.tolist() for index in rows.index] == [[2, 3, 4], [2, 3], [2], []]
    assert [inside.tolist() for inside in rows.inside] == [[2, 3, 4], [0, 1], [0], []]


def test_rows_do_not_cross_documents_and_positions_restart() -> None:
    rows = supervise(torch.tensor([0, 1, 1, 1, 1, 1, 0, 1, 1]), [3, 3, 3], 1)
    assert rows.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert [index.tolist() for index in rows.index] == [[0, 3, 6]]
    assert rows.per_document(0) == [1, 1, 1]


def test_a_gap_in_the_mask_supervises_no_row_across_it() -> None:
    rows = supervise(torch.tensor([0, 1, 1, 1, 0, 0, 1, 1]), [8], 2)
    assert [index.tolist() for index in rows.index] == [[0, 1, 5], [0]]


def test_rows_outside_the_draft_vocabulary_have_no_gradient_and_count_as_misses() -> None:
    draft, documents = make_draft(), make_documents([8, 8], seed=5)
    batch = pack(documents, 2)
    nowhere = int((~draft.t2d).nonzero()[0])
    batch = replace(batch, argmax_T=torch.full_like(batch.argmax_T, nowhere))
    loss, sums = ttt_loss(draft, batch, SliceTeacher(draft), draft_ids(draft.t2d), [1.0, 0.8])  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == 0 and sums.hits.tolist() == [0, 0] and sums.kept.tolist() == [0, 0]
    assert sums.rows[0] > 0 and sums.accuracy() == [0, 0]
    assert all(not p.grad.any() for p in draft.parameters() if p.grad is not None)
