"""Checkpoints of real shapes with no bytes behind them: headers, and files that are holes."""

import json
import struct
from pathlib import Path

KIMI_K2 = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
"""What moonshotai/Kimi-K2-Instruct's config.json says of shapes and storage."""
BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}


def kimi_k2_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to (dtype, shape): projections in fp8 with their scales, the rest in bf16."""
    plain = {"model.embed_tokens": (163840, 7168), "model.norm": (7168,), "lm_head": (163840, 7168)}
    fp8: dict[str, tuple[int, int]] = {}
    for layer in range(61):
        stem = f"model.layers.{layer}."
        plain |= {f"{stem}input_layernorm": (7168,), f"{stem}post_attention_layernorm": (7168,)}
        plain |= {f"{stem}self_attn.q_a_layernorm": (1536,), f"{stem}self_attn.kv_a_layernorm": (512,)}
        fp8 |= {
            f"{stem}self_attn.q_a_proj": (1536, 7168),
            f"{stem}self_attn.q_b_proj": (64 * 192, 1536),
            f"{stem}self_attn.kv_a_proj_with_mqa": (576, 7168),
            f"{stem}self_attn.kv_b_proj": (64 * 256, 512),
            f"{stem}self_attn.o_proj": (7168, 64 * 128),
        }
        stems = {f"{stem}mlp.": 18432} if layer == 0 else {f"{stem}mlp.experts.{e}.": 2048 for e in range(384)}
        if layer:
            plain[f"{stem}mlp.gate"] = (384, 7168)
            stems[f"{stem}mlp.shared_experts."] = 2048
        for mlp, width in stems.items():
            fp8 |= {f"{mlp}gate_proj": (width, 7168), f"{mlp}up_proj": (width, 7168), f"{mlp}down_proj": (7168, width)}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{name}.weight": ("BF16", shape) for name, shape in plain.items()
    }
    for layer in range(1, 61):
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = ("F32", (384,))
    for name, (rows, columns) in fp8.items():
        tensors[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
        tensors[f"{name}.weight_scale_inv"] = ("F32", (-(-rows // 128), -(-columns // 128)))
    return tensors


def save_sparse(folder: Path, config: dict, tensors: dict[str, tuple[str, tuple[int, ...]]], shards: int = 64) -> Path:
    """The folder of a checkpoint whose data are holes: nothing is written but headers."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map = list(tensors), dict[str, str]()
    size = -(-len(names) // shards)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part, offset, header = names[shard * size : (shard + 1) * size], 0, dict[str, dict]()
        for name in part:
            dtype, shape = tensors[name]
            end = offset + BYTES[dtype]
            for extent in shape:
                end = offset + (end - offset) * extent
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + offset)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
