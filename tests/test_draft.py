"""The draft module: what is trained is what is served, and the folder it lives in."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig, TargetIdentity
from eyas.models.checkpoint import draft_tensors, load_draft, look_at, make_info, save_draft
from eyas.models.draft import Draft
from eyas.models.draft import make_draft as new_module
from eyas.wiring.parity import ttt_equals_incremental
from test_loss import CONFIG, DRAFT_VOCAB, HIDDEN, LATENT, MLA, OPTIONS, PEAGLE, VOCAB, make_draft

TARGET = TargetIdentity(
    name="tiny", weights_hash="0", model_type="llama", num_hidden_layers=4, hidden_size=HIDDEN, vocab_size=VOCAB
)


def save(folder: Path, draft: Draft) -> Path:
    save_draft(folder, draft, make_info(draft, TARGET, tokenizer_hash="a", template_hash="b", ttt_length=3))
    return folder


@pytest.mark.parametrize("options", [*OPTIONS, {"num_hidden_layers": 2}], ids=lambda o: "-".join(o) or "plain")
def test_the_training_forward_equals_decoding_with_a_cache(options: dict[str, object]) -> None:
    taps_TA = torch.randn(20, 2 * HIDDEN)
    assert ttt_equals_incremental(make_draft(**options), taps_TA, torch.randint(0, VOCAB, (20,)), steps=4) < 1e-5


def test_parity_sees_a_sliding_window() -> None:
    draft = make_draft(sliding_window=6)
    taps_TA, ids_T = torch.randn(20, 2 * HIDDEN), torch.randint(0, VOCAB, (20,))
    assert ttt_equals_incremental(draft, taps_TA, ids_T) < 1e-5


def test_chosen_rows_get_what_all_rows_get() -> None:
    draft = make_draft()
    ids, state, rope = torch.randint(0, VOCAB, (1, 5)), torch.randn(1, 5, HIDDEN), torch.arange(5)[None]
    seen: list[tuple[int, int]] = []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen.append((query.shape[2], key.shape[2]))
        return query

    every = draft(ids, state, draft.rope(rope), attend)
    some = draft(ids, state, draft.rope(rope), attend, rows=torch.tensor([1, 4]))
    torch.testing.assert_close(some, every[:, [1, 4]])
    assert seen == [(5, 5), (2, 5)]


def test_a_lower_precision_does_not_round_the_rotary_frequencies() -> None:
    draft = make_draft()
    wanted = draft.rotary.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert draft.fc.weight.dtype == torch.bfloat16 and torch.equal(draft.rotary.inv_freq, wanted)


@pytest.mark.parametrize(
    "options", [{}, {"fc_norm": True}, {"own_embedding": True}, {"draft_vocab_size": VOCAB}, PEAGLE]
)
def test_a_saved_draft_loads_back_bit_for_bit(tmp_path: Path, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    draft = new_module(CONFIG.model_copy(update=options)) if options else make_draft()
    if draft.config.reduced_vocabulary and options:
        made = make_draft()
        draft.d2t, draft.t2d = made.d2t, made.t2d
    before = torch.get_rng_state()
    loaded, info = load_draft(save(tmp_path / "draft", draft))
    assert torch.equal(torch.get_rng_state(), before), "loading draws no numbers of the caller's"
    assert loaded.config == draft.config and info.target == TARGET and not loaded.training
    found, wanted = draft_tensors(loaded), draft_tensors(draft)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert ("d2t" in wanted) == (draft.config.draft_vocab_size == DRAFT_VOCAB)
    assert ("embed_tokens.weight" in wanted) == draft.config.own_embedding
    assert loaded.t2d.sum() == draft.config.draft_vocab_size


def put(key: str, value: object) -> Callable[[dict[str, object]], None]:
    return lambda block: block.update({key: value})


def filled(name: str, start: int, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[start:].fill_(value)


TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "missing": lambda tensors: tensors.pop("fc.weight"),
    "unexpected": lambda tensors: tensors.update({"extra.weight": torch.zeros(1)}),
    "shape": lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}),
    "nan": filled("fc.weight", -1, torch.nan),
    "infinite": filled("norm.weight", 0, -torch.inf),
    "integers": lambda tensors: tensors.update({"fc.weight": (tensors["fc.weight"] * 100).to(torch.int8)}),
    "absolute": lambda tensors: tensors.update(d2t=tensors["d2t"] + torch.arange(DRAFT_VOCAB)),
}
BLOCK: dict[str, Callable[[dict[str, object]], object]] = {
    "no number": put("rms_norm_eps", "small"),
    "zero": put("rope_theta", 0),
    "a size": put("intermediate_size", -4),
    "no rope": put("rope_scaling", {"rope_type": "banana", "factor": 2.0}),
    "layers": put("num_hidden_layers", 10**9),
    "absent": lambda block: block.pop("hidden_size"),
}
NEEDS_MORE = ("missing", "unexpected", "shape", "absolute", "integers", "no rope", "no block")
"""Than a look at the folder: the module, or the target."""
TEXTS = {
    "no block": '{"model_type": "llama"}',
    "no json": "{",
    "a list": "[]",
    "a word": '{"eyas": "x"}',
    "newer": '{"eyas": {"format": 2}}',
}


def broken(folder: Path, change: str) -> Path:
    save(folder, make_draft())
    weights, config = folder / "model.safetensors", folder / "config.json"
    if change in TENSORS:
        tensors = load_file(weights)
        TENSORS[change](tensors)
        save_file(tensors, weights)
    elif change in BLOCK:
        raw = json.loads(config.read_text())
        BLOCK[change](raw["eyas"]["draft"])
        config.write_text(json.dumps(raw))
    elif change in TEXTS:
        config.write_text(TEXTS[change])
    elif change == "truncated":
        weights.write_bytes(weights.read_bytes()[:-40])
    else:
        weights.unlink()
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", "missing: fc.weight"),
        ("unexpected", "unexpected: extra.weight"),
        ("shape", "norm.weight (3,) for (16,)"),
        ("absolute", "target ids, not offsets"),
        ("integers", "dtypes: fc.weight int8"),
        ("nan", "1 of 512 in fc.weight"),
        ("infinite", "NaN or infinity: 16 of 16 in norm.weight"),
        ("truncated", "whole safetensors"),
        ("no weights", "no such file"),
        ("no block", "no `eyas` block"),
        ("no json", "config.json"),
        ("a list", "no object: list"),
        ("no number", "draft.rms_norm_eps: 'small'"),
        ("zero", "draft.rope_theta: 0 (Input should be greater than 0)"),
        ("a size", "draft.intermediate_size: -4"),
        ("no rope", "a rope_type that transformers has: default, "),
        ("layers", "draft.num_hidden_layers: 1000000000 (Input should be less than or equal to 1000)"),
        ("a word", "`eyas`: 'x' (config_key_wrong)"),
        ("absent", "draft.hidden_size: absent"),
        ("newer", "format 2"),
    ],
)
def test_a_broken_draft_folder_is_refused_in_words(tmp_path: Path, change: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_draft(broken(tmp_path / "draft", change))
    assert words in str(caught.value)
    if change not in (
        "missing",
        "unexpected",
        "shape",
        "absolute",
        "integers",
        "no rope",
        "no block",
    ):  # these need more
        with pytest.raises(InputError) as looked:
            look_at(tmp_path / "draft")
        assert str(looked.value) == str(caught.value)


def test_a_stage_folder_loads_as_its_newest_step(tmp_path: Path) -> None:
    save(tmp_path / "step-9", make_draft(seed=1))
    save(tmp_path / "step-10", make_draft(seed=2))
    loaded, _ = load_draft(tmp_path)
    assert torch.equal(loaded.fc.weight, make_draft(seed=2).fc.weight)


@pytest.mark.parametrize(("hidden", "heads", "keys"), [(30, 4, 2), (32, 4, 3), (32, 0, 1)])
def test_heads_that_do_not_divide_are_refused_in_words(hidden: int, heads: int, keys: int) -> None:
    config = make_draft().config.model_dump()
    with pytest.raises(InputError, match="a multiple of num_attention_heads") as caught:
        DraftConfig(**config | {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": keys})
    assert caught.value.code == "shape_mismatch"


def test_a_rope_scaling_without_a_key_of_its_type_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="high_freq_factor"):
        make_draft(rope_scaling={"rope_type": "llama3", "factor": 8.0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"latent": None}, "kv_lora_rank"),
        ({"block": "llama"}, "with block mla, and with no other"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 4"),
        ({"head_dim": 8}, "head_dim 4"),
        ({"attention_bias": True}, "no attention_bias"),
    ],
)
def test_the_widths_of_latent_attention_are_there_for_that_block_and_for_no_other(changes: dict, words: str) -> None:
    whole = CONFIG.model_dump() | MLA
    assert DraftConfig.model_validate(whole).latent == LATENT
    with pytest.raises(InputError, match=words):
        DraftConfig.model_validate(whole | changes)


def test_an_embedding_of_another_target_is_refused() -> None:
    with pytest.raises(InputError, match="vocab_mismatch"):
        make_draft().share_embedding(torch.zeros(VOCAB + 1, HIDDEN))
    with pytest.raises(InputError, match="shape_mismatch"):
        make_draft().share_embedding(torch.zeros(VOCAB, HIDDEN + 1))
