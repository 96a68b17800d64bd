"""The streamed reference is the in-memory forward, bit for bit, whatever the architecture and however it is stored."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

from checkpoints import BUILD, LAYERS, QUANTISATIONS, VOCAB, published, save_shards, tiny
from eyas.data.shards import Sample
from eyas.errors import InputError
from eyas.models.streaming import plan as planning
from eyas.models.streaming.backbone import stream_boundaries
from eyas.models.streaming.plan import plan
from eyas.models.target import load_target
from eyas.wiring.check import check
from eyas.wiring.reference import final_normed, fits, reference_boundaries
from made_captures import write_captures
from sparse import KIMI_K2, kimi_k2_tensors, save_sparse
from tiny import tiny_tokenizer

PROBE = [1, *range(5, 120, 3), *range(119, 60, -4)]


def in_memory(model: PreTrainedModel, experts: str = "eager") -> list[Tensor]:
    """Every boundary by Hugging Face's own forward, the final norm taken out of it."""
    model.config._experts_implementation = experts
    norm, model.model.norm = model.model.norm, nn.Identity()
    with torch.inference_mode():
        hidden = model(torch.tensor([PROBE]), output_hidden_states=True, use_cache=False).hidden_states
    model.model.norm = norm
    return [state[0] for state in hidden]


@pytest.mark.parametrize("architecture", BUILD)
def test_streamed_is_in_memory_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    model = tiny(architecture)
    folder = save_shards(tmp_path / architecture, model.config.to_dict(), published(model))
    streamed, whole = stream_boundaries(folder, PROBE), in_memory(model)
    assert len(streamed) == LAYERS + 1
    for ours, theirs in zip(streamed, whole, strict=True):
        assert torch.equal(ours, theirs)


def load_published(model: PreTrainedModel, values: dict[str, Tensor]) -> PreTrainedModel:
    """`model` with `values`, which go by published names, folded into its stacked parameters."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in values.items():
        if name in state:
            state[name] = tensor
            continue
        stem, expert, part, _ = name.rsplit(".", 3)
        half = state[f"{stem}.gate_up_proj"].shape[1] // 2
        rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None), "down_proj": slice(None)}[part]
        state[f"{stem}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(expert)][rows] = tensor
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [("llama", "fp8"), ("qwen3_moe", "fp8"), ("deepseek_v3", "fp8"), ("deepseek_v3", "int4"), ("gpt_oss", "mxfp4")],
)
def test_a_quantised_checkpoint_streams_as_its_own_values(architecture: str, scheme: str, tmp_path: Path) -> None:
    quantise, declared = QUANTISATIONS[scheme]
    model = tiny(architecture)
    stored, values = quantise(published(model))
    config = model.config.to_dict() | {"quantization_config": declared}
    streamed = stream_boundaries(save_shards(tmp_path / "target", config, stored), PROBE)
    assert len(stored) > len(values)
    for ours, theirs in zip(streamed, in_memory(load_published(model, values)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_in_another_order_of_summation_agree_to_a_millionth(architecture: str, tmp_path: Path) -> None:
    model = tiny(architecture)
    streamed = stream_boundaries(save_shards(tmp_path / "target", model.config.to_dict(), published(model)), PROBE)
    for ours, theirs in zip(streamed, in_memory(model, experts="grouped_mm"), strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-6


def test_transformers_own_loading_of_mxfp4_gives_the_same_states(tmp_path: Path) -> None:
    quantise, declared = QUANTISATIONS["mxfp4"]
    model = tiny("gpt_oss")
    stored = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in quantise(published(model))[0].items()
    }
    folder = save_shards(tmp_path / "target", model.config.to_dict() | {"quantization_config": declared}, stored)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True), experts_implementation="eager"
    ).float()
    for ours, whole in zip(stream_boundaries(folder, PROBE), in_memory(theirs), strict=True):
        assert torch.equal(ours, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_widened_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    stored = {name: tensor.to(dtype) for name, tensor in published(model).items()}
    folder = save_shards(tmp_path / "target", model.config.to_dict(), stored, shards=66)
    whole = in_memory(load_published(model, {name: tensor.float() for name, tensor in stored.items()}))
    assert len(list(folder.glob("*.safetensors"))) == 66
    for ours, theirs in zip(stream_boundaries(folder, PROBE), whole, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_", ""])
def test_kimi_and_nested_text_configs_are_followed(prefix: str, tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    text = model.config.to_dict() | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_kimi.Kimi"}}
    config = {"model_type": "kimi_k25", "text_config": text, "auto_map": text["auto_map"]} if prefix else text
    tensors = {f"{prefix}{name}": tensor for name, tensor in published(model).items()}
    tensors["vision_tower.encoder.layers.0.input_layernorm.weight"] = torch.ones(4)
    tensors["mm_projector.proj.0.weight"] = torch.ones(4, 4)
    folder = save_shards(tmp_path / "target", config, tensors)
    whole = in_memory(model)
    for ours, theirs in zip(stream_boundaries(folder, PROBE), whole, strict=True):
        assert torch.equal(ours, theirs)
    tiny_tokenizer().save_pretrained(folder)
    assert fits(folder)
    for ours, theirs in zip(reference_boundaries(folder, PROBE), whole, strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-6
    with torch.inference_mode():
        assert torch.equal(final_normed(folder, whole[-1]), model.model.norm(whole[-1]))


def test_nothing_above_the_highest_boundary_plus_two_is_read(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    tensors = published(model)
    for name, tensor in tensors.items():
        if ".layers.3." in name or ".layers.4." in name:
            tensor.fill_(float("nan"))
    folder = save_shards(tmp_path / "target", model.config.to_dict(), tensors)
    streamed = stream_boundaries(folder, PROBE, up_to=1)
    assert len(streamed) == 4
    for ours, theirs in zip(streamed, in_memory(model), strict=False):
        assert torch.equal(ours, theirs)
    assert stream_boundaries(folder, PROBE, up_to=2)[-1].isnan().all()
    assert (plan(folder, up_to=1).layers, plan(folder).layers) == (3, LAYERS)


def test_a_target_in_memory_and_its_folder_give_the_same_reference(tiny_target: Path) -> None:
    target = load_target(str(tiny_target))
    assert fits(tiny_target)
    streamed = stream_boundaries(tiny_target, PROBE)
    for states in (reference_boundaries(target, PROBE), reference_boundaries(tiny_target, PROBE)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(states, streamed, strict=True))
    assert len(reference_boundaries(target, PROBE, up_to=3)) == 6
    assert torch.equal(final_normed(target, streamed[-1]), final_normed(tiny_target, streamed[-1]))


def test_kimi_k2_streams_under_8_gb_by_a_plan_made_from_headers(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path / "kimi", KIMI_K2, kimi_k2_tensors())
    planned = plan(folder, tokens=256)
    assert planned.shards == 64
    assert planned.read_bytes > 1e12
    attention = 4 * (7168 * (1536 + 576 + 64 * 128 + 384) + 1536 * 64 * 192 + 512 * 64 * 256 + 2 * 7168 + 1536 + 512)
    shared, dense = 3 * 4 * 7168 * 2048, 3 * 4 * 7168 * 18432
    assert planned.layer_bytes == attention + dense - 4 * 7168 * 384  # layer 0 has no router
    assert planned.group_bytes == 4 * shared
    assert planned.boundary_bytes == 62 * 256 * 7168 * 4
    assert planned.peak_bytes < 8e9
    assert plan(folder, tokens=256, up_to=58).layers == 60


def test_the_plan_needs_no_torch() -> None:
    code = "import sys, eyas.models.streaming.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_streamed_is_said_by_name(tmp_path: Path) -> None:
    model = tiny("llama")
    config, tensors = model.config.to_dict(), published(model)
    with pytest.raises(InputError, match="model_type 'mamba'"):
        stream_boundaries(save_shards(tmp_path / "a", config | {"model_type": "mamba"}, tensors), PROBE)
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    with pytest.raises(InputError, match="quantisation awq 4 bits"):
        stream_boundaries(save_shards(tmp_path / "b", config | awq, tensors), PROBE)
    integers = tensors | {"model.layers.1.mlp.up_proj.weight": torch.ones(96, 64, dtype=torch.int32)}
    with pytest.raises(InputError, match=r"up_proj.weight in floats, or as the config declares \(not quantised\)"):
        stream_boundaries(save_shards(tmp_path / "c", config, integers), PROBE)
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    with pytest.raises(InputError, match=r"model.layers.2.self_attn.k_proj.weight"):
        stream_boundaries(save_shards(tmp_path / "d", config, tensors), PROBE)
    narrow = config | {"intermediate_size": 95}
    with pytest.raises(InputError, match=r"layers.0.mlp.gate_proj.weight of shape \[95, 64\]"):
        stream_boundaries(save_shards(tmp_path / "e", narrow, tensors), PROBE)
    with pytest.raises(InputError, match=f"a row of model.embed_tokens.weight below 128; got {VOCAB}"):
        stream_boundaries(tmp_path / "e", [1, VOCAB])
    (tmp_path / "d" / "config.json").write_text(json.dumps(config)[:50])
    with pytest.raises(InputError, match="a JSON object"):
        stream_boundaries(tmp_path / "d", PROBE)


def test_scales_that_do_not_fit_their_weights_are_refused(tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    for scheme, suffix in (("fp8", "q_a_proj.weight_scale_inv"), ("int4", "1.mlp.experts.0.up_proj.weight_scale")):
        quantise, declared = QUANTISATIONS[scheme]
        stored = quantise(published(model))[0]
        name = next(name for name in stored if name.endswith(suffix))
        stored[name] = stored[name][:, :1].repeat(1, 7)
        folder = save_shards(tmp_path / scheme, model.config.to_dict() | {"quantization_config": declared}, stored)
        with pytest.raises(InputError, match=f"{suffix} of shape"):
            stream_boundaries(folder, list(range(2, 120)))


@pytest.mark.parametrize(
    ("blocks", "shift", "codes"), [((1, 2, 4), 0, []), ((1, 2, 4), 1, ["token_shift"]), ((4, 2, 1), 0, ["tap_order"])]
)
def test_captures_of_a_target_larger_than_memory_are_identified(
    blocks: tuple[int, ...], shift: int, codes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("deepseek_v3")
    folder = save_shards(tmp_path / "target", model.config.to_dict(), published(model))
    tiny_tokenizer().save_pretrained(folder)
    states = in_memory(model)
    taps = torch.cat([states[block] for block in blocks], dim=-1).roll(-shift, dims=0)
    sample = Sample("a", "train", taps, states[-1], torch.tensor(PROBE), torch.ones(len(PROBE), dtype=torch.bool))
    written = write_captures(
        tmp_path / "captures", load_target(str(folder)), [sample], boundaries=[1, 2, 4], greedy=False
    )
    monkeypatch.setattr(planning, "SHARE_OF_MEMORY", 0.0)
    result = check(str(folder), captures=written)
    assert [one["code"] for one in result["findings"]] == codes
    statuses = {one["name"]: one["status"] for one in result["checks"]}
    assert statuses["tap identity"] == ("fail" if codes else "pass")
    assert statuses["teacher"] == "unknown"
