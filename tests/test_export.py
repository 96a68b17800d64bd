"""An export holds the same draft, in both engines' words, or nothing at all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from eyas.errors import InputError
from eyas.export import sglang, vllm
from eyas.export.folder import check_exportable, export_draft, refusals
from eyas.formats.engines import parse_engine
from eyas.formats.headers import read_headers
from eyas.formats.names import expected_tensors
from eyas.formats.taps import IDS_KEY
from eyas.models.checkpoint import load_draft, make_info, save_draft
from eyas.models.draft import Draft
from eyas.pipeline.inspect import inspect_path
from eyas.recipe import ExportSettings
from eyas.run import verify_files
from test_formats import LATENT, MLA, TARGET, draft_config

BOTH, VLLM = ExportSettings(), ExportSettings(engines=("vllm",))
OLD_AND_NEW = ExportSettings(engines=("sglang@0.5.12", "sglang@0.5.23"))


KIMI_YARN = {
    **{"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 8},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}


LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def saved_draft(folder: Path, **options) -> Draft:
    torch.manual_seed(0)
    draft = Draft(draft_config(**options))
    rows = draft.config.draft_vocab_size
    if draft.config.reduced_vocabulary:
        draft.d2t.copy_(torch.arange(rows))  # draft id i is target id 2i
        draft.t2d[2 * torch.arange(rows)] = True
    info = make_info(draft, TARGET, tokenizer_hash="a", template_hash="b", ttt_length=3)
    save_draft(folder, draft, info)
    return draft


def attend(layer, query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def first_step_logits(draft: Draft, embedding: torch.Tensor) -> torch.Tensor:
    draft = draft.eval()
    draft.share_embedding(embedding)
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(1, 9, draft.config.taps_width, generator=generator)
    ids = torch.randint(259, (1, 9), generator=generator)
    with torch.no_grad():
        rope = draft.rope(torch.arange(9)[None])
        return draft.logits(draft(ids, draft.fuse(taps), rope, attend))


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, BOTH),
        ({"fc_norm": True, "norm_output": True}, BOTH),
        ({"norm_before_fc": True, "draft_vocab_size": 259}, BOTH),
        ({"num_hidden_layers": 3}, BOTH),
        ({"block": "qwen3", "norm_before_residual": True}, VLLM),
        ({"boundaries": (0, 3, 5, 8)}, VLLM),
        ({"sliding_window": 32}, VLLM),
        ({"own_embedding": True}, VLLM),
        (MLA, BOTH),
        ({**MLA, "fc_norm": True, "norm_output": True, "draft_vocab_size": 259}, BOTH),
        ({**MLA, "num_hidden_layers": 2}, VLLM),
    ],
)
def test_an_export_loads_back_to_the_same_logits(tmp_path: Path, options, settings):
    draft = saved_draft(tmp_path / "draft", **options)
    manifest = export_draft(tmp_path / "draft", tmp_path / "out", settings)
    back, info = load_draft(tmp_path / "out")
    embedding = torch.randn(259, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(first_step_logits(draft, embedding), first_step_logits(back, embedding))
    assert torch.equal(draft.d2t, back.d2t) and back.config == draft.config and info.target == TARGET
    assert manifest.files.keys() == {"config.json", "model.safetensors"} and verify_files(tmp_path / "out") == []
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_an_export_holds_the_names_and_dtypes_engines_read(tmp_path: Path):
    saved_draft(tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", BOTH)
    headers = read_headers(tmp_path / "out")
    shapes = expected_tensors(draft_config())
    assert {name.replace("midlayer.", "layers.0.") for name in headers} == shapes.keys()
    assert headers["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert (headers["d2t"].dtype, headers["t2d"].dtype, headers["fc.weight"].dtype) == ("I64", "BOOL", "F32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config[IDS_KEY], config["eagle_config"][IDS_KEY]) == ([2, 4, 5], [1, 3, 4])
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_theta"] == 10_000.0


@pytest.mark.parametrize("options", [{}, {"num_hidden_layers": 2}, MLA | {"rope_scaling": KIMI_YARN}])
def test_an_export_always_says_what_engines_would_otherwise_guess(tmp_path: Path, options):
    saved_draft(tmp_path / "draft", rope_theta=50_000.0, **options)
    export_draft(tmp_path / "draft", tmp_path / "out", BOTH)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    scaling = options.get("rope_scaling")
    wanted = {
        "num_aux_hidden_states": 3,
        "draft_vocab_size": 100,
        "head_dim": 8 if "latent" in options else 16,
        "tie_word_embeddings": False,
        "target_hidden_size": 64,
        "max_position_embeddings": 512,
        "rope_theta": 50_000.0,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": 50_000.0},
    }
    assert {key: config[key] for key in wanted} == wanted


def test_an_mla_export_speaks_to_both_engines(tmp_path: Path):
    """deepseek_v2: of a deepseek_v3 draft vLLM makes DeepSeek's own multi-token-prediction module."""
    saved_draft(tmp_path / "draft", **MLA, target_model_type="kimi_k2", target_num_hidden_layers=61,
        boundaries=(2, 30, 58))  # fmt: skip
    export_draft(tmp_path / "draft", tmp_path / "out", BOTH)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Eagle3DeepseekV2ForCausalLM"], "deepseek_v2")
    assert {key: config[key] for key in LATENT} == LATENT
    assert (config[IDS_KEY], config["eagle_config"][IDS_KEY]) == ([2, 30, 58], [1, 29, 57])
    read = AutoConfig.from_pretrained(tmp_path / "out")
    assert (read.kv_lora_rank, read.head_dim, read.num_key_value_heads) == (16, 8, 4)
    headers = read_headers(tmp_path / "out")
    assert {name: header.shape for name, header in headers.items() if "self_attn" in name} == {
        "midlayer.self_attn.q_a_proj.weight": (24, 128),
        "midlayer.self_attn.q_a_layernorm.weight": (24,),
        "midlayer.self_attn.q_b_proj.weight": (80, 24),
        "midlayer.self_attn.kv_a_proj_with_mqa.weight": (24, 128),
        "midlayer.self_attn.kv_a_layernorm.weight": (16,),
        "midlayer.self_attn.kv_b_proj.weight": (88, 16),
        "midlayer.self_attn.o_proj.weight": (64, 40),
    }


def test_a_later_layer_stores_one_norm_under_both_engines_names(tmp_path: Path):
    draft = saved_draft(tmp_path / "draft", num_hidden_layers=2)
    with torch.no_grad():
        draft.layers[1].input_layernorm.weight.normal_()
    save_draft(tmp_path / "draft", draft, make_info(draft, TARGET, tokenizer_hash="", template_hash=None, ttt_length=3))
    export_draft(tmp_path / "draft", tmp_path / "out", BOTH)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], draft.layers[1].input_layernorm.weight)
    assert not torch.equal(tensors["layers.0.hidden_norm.weight"], tensors["layers.1.hidden_norm.weight"])


def test_inspect_finds_nothing_wrong_with_an_export(tmp_path: Path):
    saved_draft(tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", BOTH)
    seen = inspect_path(tmp_path / "out", verify=True)
    assert (seen["kind"], seen["format"], seen["boundaries"]) == ("draft", "eyas", [2, 4, 5])
    assert [seen["dialects"][name]["captures"] for name in ("sglang", "vllm", "vllm_v1", "llamacpp")] == [[2, 4, 5]] * 4
    assert seen["findings"] == [] and seen["verified"] is True


def test_inspect_verify_finds_a_changed_byte(tmp_path: Path):
    saved_draft(tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", BOTH)
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    seen = inspect_path(tmp_path / "out", verify=True)
    assert [finding["code"] for finding in seen["findings"]] == ["data_corrupt"] and seen["verified"] is False


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({"norm_before_residual": True}, BOTH, "residual"),
        ({"block": "qwen3"}, BOTH, "qwen3"),
        ({"attention_bias": True}, BOTH, "biases"),
        ({"own_embedding": True}, BOTH, "embedding"),
        ({"boundaries": (4,)}, BOTH, "skips fc"),
        ({"fc_bias": True}, VLLM, "fc.bias"),
        ({"sliding_window": 32}, BOTH, "sliding_window"),
        ({"sliding_window": 32, "block": "qwen3"}, ExportSettings(engines=("vllm@0.24",)), "sliding_window"),
        ({"hidden_size": 32, "head_dim": 8}, BOTH, "64 wide"),
        ({"boundaries": (1, 4, 6), "target_model_type": "kimi_k2"}, BOTH, "no such list"),
        ({"boundaries": (0, 4, 6), "target_model_type": "kimi_k2"}, VLLM, "boundary 0 fails"),
        ({"boundaries": (3, 4, 6), "target_model_type": "kimi_k2"}, OLD_AND_NEW, "from the list that the others need"),
        ({"fc_norm": True}, ExportSettings(engines=("vllm@0.20",)), "0.24"),
        ({"boundaries": (2, 4, 8)}, BOTH, "no such list"),
        ({"target_model_type": "mystery"}, BOTH, "no known rule"),
        ({"boundaries": (2, 4, 8)}, BOTH, "export.engines=..vllm"),
        ({**MLA, "num_hidden_layers": 2}, BOTH, "exactly one"),
        ({**MLA, "norm_before_residual": True}, BOTH, "residual"),
        ({**MLA, "norm_before_fc": True}, VLLM, "input_norm"),
        ({**MLA, "norm_before_fc": True}, ExportSettings(engines=("sglang",)), "input_norm"),
        ({**MLA, "sliding_window": 32}, VLLM, "attends to everything"),
        ({**MLA, "sliding_window": 32}, ExportSettings(engines=("sglang",)), "attends to everything"),
        ({**MLA, "rope_scaling": LLAMA3}, VLLM, "llama3 for DeepSeek's YaRN"),
        (MLA, ExportSettings(engines=("sglang@0.5.11",)), "no MLA draft"),
        ({**MLA, "fc_norm": True}, ExportSettings(engines=("sglang@0.5.12",)), "from 0.5.13"),
        (MLA, ExportSettings(engines=("vllm@0.24",)), "rewrites the draft's rope"),
        (
            {"rope_scaling": KIMI_YARN},
            ExportSettings(engines=("sglang@0.5.13",)),
            "read from 0.5.16",
        ),
        ({"rope_scaling": KIMI_YARN}, ExportSettings(engines=("vllm@0.24",)), "read from 0.32"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_and_nothing_is_written(tmp_path: Path, options, settings, words):
    saved_draft(tmp_path / "draft", **options)
    with pytest.raises(InputError, match=words) as error:
        export_draft(tmp_path / "draft", tmp_path / "out", settings)
    assert error.value.exit_code == 2
    assert [item.name for item in tmp_path.iterdir()] == ["draft"]


def test_refusals_are_known_before_a_draft_is_trained():
    assert refusals(draft_config(), ["sglang", "vllm"]) == []
    assert len(refusals(draft_config(fc_bias=True, own_embedding=True), ["sglang", "vllm"])) == 2
    check_exportable(draft_config(block="qwen3"), VLLM)


def test_older_releases_cannot_do_what_came_later():
    config = draft_config(fc_norm=True, norm_before_fc=True)
    assert [len(sglang.cannot(config, parse_engine(f"sglang@{r}"))) for r in ("0.5.11", "0.5.12", "0.5.17")] == [
        2,
        1,
        0,
    ]
    assert len(vllm.cannot(draft_config(block="qwen3"), parse_engine("vllm@0.20"))) == 1


def test_an_earlier_export_is_replaced_and_anything_else_is_kept(tmp_path: Path):
    saved_draft(tmp_path / "draft")
    first = export_draft(tmp_path / "draft", tmp_path / "out", BOTH)
    again = export_draft(tmp_path / "draft", tmp_path / "out", BOTH)
    assert first.files == again.files
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("two years")
    with pytest.raises(InputError, match="something else"):
        export_draft(tmp_path / "draft", foreign, BOTH)
    assert (foreign / "thesis.txt").read_text() == "two years"


def test_a_truncated_draft_is_an_input_error(tmp_path: Path):
    saved_draft(tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError):
        export_draft(tmp_path / "draft", tmp_path / "out", BOTH)
    with pytest.raises(InputError, match="truncated"):
        inspect_path(tmp_path / "draft")
    assert not (tmp_path / "out").exists()
