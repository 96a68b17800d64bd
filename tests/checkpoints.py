"""Tiny published-style checkpoints: each architecture, several shards, its weights plain or quantised.

Quantisers here are written from the formats' definitions, slowly and apart from `eyas.models.dequantise`.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LAYERS, HIDDEN, VOCAB, EXPERTS = 5, 64, 128, 6
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 50_000.0}


def tiny(architecture: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose layers each move the residual by a good part of its norm."""
    torch.manual_seed(seed)
    model = BUILD[architecture]().to(torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.normal_(1.0, 0.1)
        elif "embed" in name:
            parameter.normal_(0.0, 1.0)
        elif parameter.dim() < 2:
            parameter.normal_(0.0, 0.2)
        else:
            parameter.normal_(0.0, 0.8 / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(0.0, 0.1)
    return model


def _deepseek() -> PreTrainedModel:
    config = COMMON | MOE | MLA | {"num_key_value_heads": 4, "n_routed_experts": EXPERTS, "first_k_dense_replace": 1}
    config |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "rope_parameters": YARN, "num_mtp_layers": 0}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config))


def _gpt_oss() -> PreTrainedModel:
    config = COMMON | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
    return GptOssForCausalLM(GptOssConfig(**config | {"rope_parameters": YARN}))


BUILD = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON | {"head_dim": 16})),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**COMMON | MOE | {"num_experts": EXPERTS, "head_dim": 16, "norm_topk_prob": True})
    ),
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}


def published(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors under the names that checkpoints of this architecture are published with."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj") and model.config.model_type != "gpt_oss":
            stem = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(tensor):
                tensors[f"{stem}{expert}.gate_proj.weight"], tensors[f"{stem}{expert}.up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj") and model.config.model_type != "gpt_oss":
            for expert, one in enumerate(tensor):
                tensors[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = one
        else:
            tensors[name] = tensor
    return {name: tensor.clone() for name, tensor in tensors.items()}


def save_shards(folder: Path, config: dict, tensors: dict[str, Tensor], shards: int = 3) -> Path:
    """config.json, `shards` safetensors files and their index; tensors dealt out in turn, as no layer is whole."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in sorted(tensors)[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_fp8(tensors: dict[str, Tensor], block: int = 16) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every projection in e4m3 with one scale a block: (stored, the values it stands for)."""
    stored, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not _projection(name):
            stored[name] = values[name] = tensor
            continue
        codes, value = torch.zeros_like(tensor).to(torch.float8_e4m3fn), torch.zeros_like(tensor)
        grid = [-(-size // block) for size in tensor.shape]
        scales = torch.zeros(grid)
        for row in range(grid[0]):
            for column in range(grid[1]):
                part = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
                scale = tensor[part].abs().max() / 448.0
                scales[row, column] = scale
                codes[part] = (tensor[part] / scale).to(torch.float8_e4m3fn)
                value[part] = codes[part].float() * scale
        stored[name], stored[f"{name}_scale_inv"], values[name] = codes, scales, value
    return stored, values


def as_int4(tensors: dict[str, Tensor], group: int = 32) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The routed experts in packed int4, as Kimi-K2.5 publishes them: (stored, the values it stands for)."""
    stored, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            stored[name] = values[name] = tensor
            continue
        rows, columns = tensor.shape
        grouped = tensor.reshape(rows, columns // group, group)
        scale = (grouped.abs().amax(dim=-1, keepdim=True) / 7.0).bfloat16()
        codes = (grouped / scale.float()).round().clamp(-8, 7).int()
        values[name] = (codes * scale.float()).reshape(rows, columns)
        nibbles = (codes.reshape(rows, columns // 8, 8) + 8).long()
        words = sum(nibbles[..., place] << (4 * place) for place in range(8))
        stored[f"{name}_packed"] = torch.where(words >= 2**31, words - 2**32, words).int()
        stored[f"{name}_scale"] = scale[..., 0]
        stored[f"{name}_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
    return stored, values


def as_mxfp4(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """gpt-oss's experts in MXFP4, transposed as it publishes them: (stored, the values it stands for)."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    stored, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = values[name] = tensor
            continue
        groups = tensor.transpose(1, 2).unflatten(-1, (-1, 32))
        exponent = torch.floor(torch.log2(groups.abs().amax(dim=-1, keepdim=True))) - 2
        scaled = groups / 2.0**exponent
        code = (scaled.abs()[..., None] - grid).abs().argmin(dim=-1)
        values[name] = (grid[code] * scaled.sign() * 2.0**exponent).flatten(-2).transpose(1, 2).contiguous()
        nibbles = (code + 8 * (scaled < 0)).to(torch.uint8).unflatten(-1, (16, 2))
        stored[f"{name}_blocks"] = nibbles[..., 0] | (nibbles[..., 1] << 4)
        stored[f"{name}_scales"] = (exponent[..., 0] + 127).to(torch.uint8)
    return stored, values


def _projection(name: str) -> bool:
    """What DeepSeek stores in fp8: linear layers, not the router, the embedding or the head."""
    return "proj" in name and name.endswith(".weight")


QUANTISATIONS = {
    "fp8": (as_fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}),
    "mxfp4": (as_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
    "int4": (
        as_int4,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
                }
            },
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        },
    ),
}
