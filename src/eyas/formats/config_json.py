"""A draft's config.json, written for the engines: one file that SGLang, vLLM and llama.cpp each read right.

Sources: SGLang 0.5.23 models/llama_eagle3.py and spec_aux_hidden_state.py, vLLM 0.33 eagle3_utils.py and
llama_eagle3.py, as read. SGLang takes layer ids from `eagle_config` only, vLLM's V2 runner and llama.cpp from the top
level only: the two lists differ and do not clash.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig
from eyas.formats.engines import Engine, parse_engine
from eyas.formats.methods import METHODS
from eyas.formats.taps import IDS_KEY, ids_for

JSON = dict[str, Any]
ARCHITECTURES = {
    "llama": ("LlamaForCausalLMEagle3", "llama"),
    "qwen3": ("Eagle3Qwen3ForCausalLM", "qwen3"),
    "mla": ("Eagle3DeepseekV2ForCausalLM", "deepseek_v2"),
}
"""Block to class name and model_type; the first and the last name exist in SGLang and in vLLM. Not deepseek_v3: vLLM
(0.20 to 0.33 config/speculative.py) takes a draft of that model_type for DeepSeek's own MTP module."""


def to_json(
    config: DraftConfig,
    eyas: Mapping[str, Any],
    *,
    dtype: str = "float32",
    engines: Sequence[Engine] | None = None,
    strict: bool = False,
) -> JSON:
    """The content of config.json. `eyas` is the block of that name (format, draft, target, hashes, ...).

    `engines` defaults to the newest SGLang and vLLM. What an engine cannot represent is left out of its own key, or
    with `strict` raises InputError.
    """
    engines = (parse_engine("sglang"), parse_engine("vllm")) if engines is None else engines
    architecture, model_type = ARCHITECTURES[config.block]
    content: JSON = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": dtype,
        "eyas": dict(eyas),
        **_layer_keys(config),
        **({} if config.latent is None else config.latent.model_dump()),
        **rope_keys(config),
        **_wiring_keys(config),
    }
    return content | tap_keys(config, engines, strict=strict)


def _layer_keys(config: DraftConfig) -> JSON:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        # SGLang reads this as an attribute: the key must exist; null would put the target's head in place of ours
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def rope_keys(config: DraftConfig) -> JSON:
    """The rotary settings in both spellings: transformers 5's, and the older one that older releases read."""
    scaling = None
    if config.rope_scaling is not None:
        kind = config.rope_scaling.get("rope_type", config.rope_scaling.get("type", "default"))
        scaling = {**config.rope_scaling, "rope_type": kind}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
    }


def _wiring_keys(config: DraftConfig) -> JSON:
    return {
        "target_hidden_size": config.target_hidden_size,  # never null: SGLang multiplies it
        "num_aux_hidden_states": len(config.boundaries),  # vLLM counts the nested ids otherwise, else takes 3
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        **({"bias": True} if config.fc_bias else {}),
        **dict.fromkeys(METHODS[config.method].mask_keys, config.mask_token_id),
        **_window_keys(config),
    }


def _window_keys(config: DraftConfig) -> JSON:
    """vLLM's draft has a window where layer_types says so; SGLang's only by a server flag."""
    if config.sliding_window is None:
        return {}
    types = ["sliding_attention"] * config.num_hidden_layers
    return {"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": types}


def tap_keys(config: DraftConfig, engines: Sequence[Engine], *, strict: bool) -> JSON:
    """Both keys of layer ids, each in its reader's own numbering."""
    keys: JSON = {"eagle_config": {"use_aux_hidden_state": True}}
    target_type, n = config.target_model_type, config.target_num_hidden_layers
    for engine in engines:
        holder = keys["eagle_config"] if engine.name == "sglang" else keys
        try:
            holder[IDS_KEY] = ids_for(engine, config.boundaries, target_type, n)
        except InputError:
            if strict:
                raise
    return keys
