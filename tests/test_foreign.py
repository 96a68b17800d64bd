"""Drafts made elsewhere: read back, exported for both engines, refused where their wiring is not known."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.cli import main
from eyas.errors import InputError
from eyas.export.folder import export_draft, refusals
from eyas.formats.names import spell
from eyas.formats.taps import IDS_KEY
from eyas.models.checkpoint import draft_tensors, load_draft, make_info, save_draft
from eyas.models.draft import Draft
from eyas.models.foreign import NamedTarget, name_target
from eyas.models.target import load_target
from eyas.recipe import ExportSettings, TargetSettings
from eyas.wiring.loaders import loader_report, read_target
from test_formats import LATENT, MLA, TARGET, draft_config
from tiny import save_tiny_target

LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size", "rope_theta", "attention_bias"),
)
BOTH, VLLM = ExportSettings(), ExportSettings(engines=("vllm",))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def made_elsewhere(folder: Path, writer: str, change=lambda raw, tensors: None, **options) -> Draft:
    """A draft as `writer` would store it, without a word of Eyas."""
    torch.manual_seed(0)
    draft = Draft(draft_config(**options))
    if draft.config.reduced_vocabulary:
        rows = torch.arange(draft.config.draft_vocab_size)
        draft.d2t.copy_(rows)
        draft.t2d[2 * rows] = True
    layer = {key: getattr(draft.config, key) for key in LAYER_KEYS} | {"model_type": "llama"}
    outputs = [boundary - 1 for boundary in draft.config.boundaries]
    common = {"draft_vocab_size": draft.config.draft_vocab_size, "tie_word_embeddings": False}
    raw = {
        "specforge": layer | common | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {IDS_KEY: outputs}},
        "speculators": common
        | {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "norm_before_residual": draft.config.norm_before_residual,
            IDS_KEY: list(draft.config.boundaries),
        },
        "modelopt": layer
        | common
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {IDS_KEY: outputs, "use_last_layernorm": True},
        },
        "eagle": layer | common | {"architectures": ["LlamaForCausalLM"]},
    }[writer]
    tensors = {spell(name, writer): tensor.clone() for name, tensor in draft_tensors(draft).items()}
    change(raw, tensors)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return draft


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_targets_three_tensors_make_the_same_identity_as_the_whole(target: Path):
    named, whole = name_target(str(target)), load_target(str(target))
    assert named.identity == whole.identity and named.context_length == 1024
    assert torch.equal(named.embedding, whole.embedding)


@pytest.mark.parametrize("writer", ["specforge", "speculators", "modelopt"])
def test_a_foreign_draft_comes_back_whole_and_exports_for_both(tmp_path: Path, target: Path, writer: str):
    draft = made_elsewhere(tmp_path / "draft", writer)
    back, info = load_draft(tmp_path / "draft", foreign=name_target(str(target)))
    assert same(draft_tensors(back), draft_tensors(draft)) and back.config.boundaries == (2, 4, 5)
    assert (info.ttt_length, back.config.max_position_embeddings) == (None, 1024)  # the target's context
    export_draft(tmp_path / "draft", tmp_path / "out", BOTH, TargetSettings(name=str(target)))
    again, exported = load_draft(tmp_path / "out")
    assert same(draft_tensors(again), draft_tensors(draft)) and exported.target == info.target
    for engine in ("sglang@0.5.12", "sglang@0.5.23", "vllm@0.24", "vllm@0.33", "vllm@0.33/v1"):
        report = loader_report(tmp_path / "out", engine, read_target(target))
        assert (report.verdict, report.boundaries, report.findings) == ("pass", (2, 4, 5), []), engine


def test_options_are_read_from_the_tensors_where_keys_do_not_say_them(tmp_path: Path, target: Path):
    options = {"fc_norm": True, "norm_before_fc": True, "num_hidden_layers": 2, "block": "qwen3"}

    def forget(raw, tensors):
        raw["transformer_layer_config"]["num_hidden_layers"] = 40

    draft = made_elsewhere(tmp_path / "draft", "speculators", forget, **options)
    back, _ = load_draft(tmp_path / "draft", foreign=name_target(str(target)))
    assert all(getattr(back.config, name) == value for name, value in options.items())
    assert same(draft_tensors(back), draft_tensors(draft))


def test_t2d_follows_from_d2t_and_a_copy_of_the_targets_embedding_is_dropped(tmp_path: Path, target: Path):
    named = name_target(str(target))

    def change(raw, tensors):
        del tensors["t2d"]
        tensors["d2t"] = tensors["d2t"].to(torch.int32)
        tensors["embed_tokens.weight"] = named.embedding.to(torch.bfloat16)

    draft = made_elsewhere(tmp_path / "draft", "specforge", change)
    back, _ = load_draft(tmp_path / "draft", foreign=named)
    assert torch.equal(back.t2d, draft.t2d) and not back.config.own_embedding


def test_an_embedding_of_its_own_is_kept_and_refused_for_sglang(tmp_path: Path, target: Path):
    made_elsewhere(tmp_path / "draft", "specforge", own_embedding=True)
    where = TargetSettings(name=str(target))
    with pytest.raises(InputError, match="own_embedding"):
        export_draft(tmp_path / "draft", tmp_path / "out", BOTH, where)
    assert not (tmp_path / "out").exists()
    export_draft(tmp_path / "draft", tmp_path / "out", VLLM, where)
    assert load_draft(tmp_path / "out")[1].draft.own_embedding


KIMI_YARN = {
    **{"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16, "beta_fast": 1.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}


def latent_draft(folder: Path, **keys: object) -> tuple[Draft, NamedTarget]:
    """The layout of the published Kimi-K2.5 MLA draft: `layers.0.*`, a whole vocabulary, no context, no head_dim."""
    torch.manual_seed(0)
    config = draft_config(**MLA, boundaries=(2, 30, 58), target_num_hidden_layers=61, target_model_type="kimi_k2",
        draft_vocab_size=259, rope_theta=50_000.0, rope_scaling=KIMI_YARN, max_position_embeddings=8192)  # fmt: skip
    draft = Draft(config)
    raw = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        **{key: getattr(config, key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, **LATENT, "hidden_act": "silu", "rms_norm_eps": 1e-05},
        **{"vocab_size": 259, "draft_vocab_size": 259, "rope_theta": 50_000.0, "rope_scaling": KIMI_YARN},
        "eagle_config": {
            IDS_KEY: [1, 29, 57],
            **{"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True},
            **{"use_last_layernorm": True, "use_mtp_layernorm": False},
        },
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | keys))
    save_file({name: tensor.clone() for name, tensor in draft_tensors(draft).items()}, folder / "model.safetensors")
    identity = TARGET.model_copy(update={"model_type": "kimi_k2", "num_hidden_layers": 61})
    return draft, NamedTarget(identity, 8192, torch.randn(259, 64))


def test_a_latent_draft_of_the_published_layout_comes_back_whole(tmp_path: Path):
    draft, named = latent_draft(tmp_path / "draft")
    back, info = load_draft(tmp_path / "draft", foreign=named)
    assert back.config == draft.config and info.target == named.identity
    assert same(draft_tensors(back), draft_tensors(draft))
    assert back.layers[0].self_attn.stretch == pytest.approx(1.41588831**2)  # (0.1 ln 64 + 1)^2
    assert refusals(back.config, ["sglang", "vllm"]) == []


def test_a_latent_draft_that_rotates_halves_or_lacks_a_width_is_refused(tmp_path: Path):
    _, named = latent_draft(tmp_path / "halves", rope_interleave=False)
    with pytest.raises(InputError, match="interleave"):
        load_draft(tmp_path / "halves", foreign=named)
    latent_draft(tmp_path / "narrow", q_lora_rank=None)
    with pytest.raises(InputError, match="q_lora_rank"):
        load_draft(tmp_path / "narrow", foreign=named)


def test_norms_of_a_later_layer_must_agree_for_both_engines(tmp_path: Path, target: Path):
    def second(raw, tensors, scale):
        name = "layers.1.input_layernorm.weight"
        tensors["layers.1.hidden_norm.weight"] = tensors[name] * scale

    named = name_target(str(target))
    made_elsewhere(tmp_path / "same", "speculators", lambda r, t: second(r, t, 1.0), num_hidden_layers=2)
    assert load_draft(tmp_path / "same", foreign=named)[0].config.num_hidden_layers == 2
    made_elsewhere(tmp_path / "other", "speculators", lambda r, t: second(r, t, 2.0), num_hidden_layers=2)
    with pytest.raises(InputError, match="norms that differ"):
        load_draft(tmp_path / "other", foreign=named)


@pytest.mark.parametrize(
    ("writer", "ids", "words"),
    [
        ("specforge", [3, 5, 6], "not known"),
        ("eagle", None, "no ids"),
        ("modelopt", None, "no ids"),
    ],
)
def test_wiring_that_is_not_known_is_asked_for_and_never_guessed(tmp_path: Path, target: Path, writer, ids, words):
    def ambiguous(raw, tensors):
        raw.pop("eagle_config", None)
        if ids is not None:
            raw["eagle_config"] = {IDS_KEY: ids}

    made_elsewhere(tmp_path / "draft", writer, ambiguous)
    named = name_target(str(target))
    with pytest.raises(InputError, match=words) as error:
        load_draft(tmp_path / "draft", foreign=named)
    assert "--boundaries" in error.value.next
    assert load_draft(tmp_path / "draft", foreign=named, boundaries=(2, 4, 5))[0].config.boundaries == (2, 4, 5)


def test_stated_boundaries_do_not_overrule_the_file(tmp_path: Path, target: Path):
    made_elsewhere(tmp_path / "draft", "specforge")
    with pytest.raises(InputError, match="as stated"):
        load_draft(tmp_path / "draft", foreign=name_target(str(target)), boundaries=(1, 3, 4))


def test_without_a_target_the_error_says_how_to_name_it(tmp_path: Path, target: Path, capsys):
    made_elsewhere(tmp_path / "draft", "specforge")
    with pytest.raises(InputError, match="no `eyas` block") as error:
        load_draft(tmp_path / "draft")
    assert "--target" in error.value.next
    with pytest.raises(SystemExit) as caught:
        main(["export", "--draft", str(tmp_path / "draft"), "--out", str(tmp_path / "out"), "--json",
              "--target", str(target), "--boundaries", "2,x"])  # fmt: skip
    assert caught.value.code == 2 and "numbers" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["export", "--draft", str(tmp_path / "draft"), "--out", str(tmp_path / "out"), "--target", str(target)])
    assert caught.value.code == 0 and (tmp_path / "out" / "manifest.json").is_file()


def test_an_export_of_eyas_needs_no_target_named(tmp_path: Path, target: Path):
    draft, named = Draft(draft_config(draft_vocab_size=259)), name_target(str(target))
    info = make_info(draft, named.identity, tokenizer_hash="a", template_hash=None, ttt_length=3)
    save_draft(tmp_path / "draft", draft, info)
    export_draft(tmp_path / "draft", tmp_path / "out", BOTH, TargetSettings(name="nowhere/at-all"))
    assert load_draft(tmp_path / "out")[1].ttt_length == 3


def test_pickles_and_sharded_drafts(tmp_path: Path, target: Path):
    draft, named = made_elsewhere(tmp_path / "draft", "specforge"), name_target(str(target))
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    (tmp_path / "draft" / "model.safetensors").unlink()
    (tmp_path / "draft" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="runs code"):
        load_draft(tmp_path / "draft", foreign=named)
    names, shards = sorted(tensors), ("a.safetensors", "b.safetensors")
    halves = (names[:5], names[5:])
    for shard, half in zip(shards, halves, strict=True):
        save_file({name: tensors[name] for name in half}, tmp_path / "draft" / shard)
    weight_map = {name: shard for shard, half in zip(shards, halves, strict=True) for name in half}
    index = tmp_path / "draft" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert same(draft_tensors(load_draft(tmp_path / "draft", foreign=named)[0]), draft_tensors(draft))


def test_a_named_target_is_what_it_says(target: Path):
    assert isinstance(name_target(str(target)), NamedTarget)
    with pytest.raises(InputError):
        name_target(str(target / "nothing"))
