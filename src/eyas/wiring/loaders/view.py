"""A draft's config.json as one engine reads it: which key, from where, with which default. No torch.

Sources, as read: SGLang 0.5.11 to 0.5.23 models/llama_eagle3.py, kimi_k25_eagle3.py, llama.py; vLLM 0.20 to 0.33
model_executor/models/{llama,qwen3,deepseek}_eagle3.py, transformers_utils/configs/{eagle,speculators/algos}.py;
transformers 5 for the defaults of a LlamaConfig and for how it merges the rope keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.formats.config_problems import architectures
from eyas.formats.engines import Engine
from eyas.formats.methods import mask_token_of, method_of
from eyas.formats.taps import IDS_KEY, TapKeys

Config = Mapping[str, Any]
Block = Literal["llama", "qwen3", "mla"]
NESTED_IDS = f"eagle_config.{IDS_KEY}"
DEFAULT_THETA, DEFAULT_AUX = 10_000.0, 3
DEFAULT_CONTEXTS = {"deepseek_v3": 4096, "kimi_k2": 4096, "qwen3": 32768}
"""max_position_embeddings where config.json has none, by its model_type (transformers 5); 2048 for a Llama."""

SGLANG_CLASSES: dict[str, tuple[Block, str]] = {
    "LlamaForCausalLMEagle3": ("llama", "0.5.11"),
    "Eagle3DeepseekV2ForCausalLM": ("mla", "0.5.12"),
}
VLLM_CLASSES: dict[str, tuple[Block, str]] = {
    "LlamaForCausalLMEagle3": ("llama", "0.20"),
    "Eagle3LlamaForCausalLM": ("llama", "0.20"),
    "Eagle3MiniMaxM2ForCausalLM": ("llama", "0.20"),
    "Eagle3Qwen2_5vlForCausalLM": ("llama", "0.20"),
    "Eagle3Qwen3vlForCausalLM": ("llama", "0.20"),
    "Eagle3Qwen3ForCausalLM": ("qwen3", "0.24"),
    "PeagleLlamaForCausalLM": ("llama", "0.24"),
    "PeagleQwen3ForCausalLM": ("qwen3", "0.24"),
    "Eagle3DeepseekV2ForCausalLM": ("mla", "0.20"),
    "Eagle3DeepseekV3ForCausalLM": ("mla", "0.20"),
}
"""Class name in `architectures` to the block it builds and the first known release that has it."""


@dataclass(frozen=True)
class Read:
    """One setting as an engine takes it. `where` is the key it came from, or words for why none was read."""

    value: Any
    where: str


@dataclass(frozen=True)
class View:
    """What an engine makes of a config.json."""

    engine: Engine
    class_name: str | None
    known: bool
    """Whether the engine has a draft class of that name; if not, the rest is what it would do under the nearest."""
    block: Block
    config: Config
    """The keys the draft class sees: config.json itself, or what vLLM makes of the speculators format."""
    reads: dict[str, Read] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        read = self.reads.get(name)
        return None if read is None else read.value

    @property
    def keys(self) -> TapKeys:
        return TapKeys.of(self.config)


def view_of(raw: Config, engine: Engine) -> View:
    """`raw` as `engine` reads it."""
    config = speculators_config(raw, engine) if engine.name == "vllm" else raw
    names = architectures(config)
    if engine.name == "vllm" and not is_speculators(raw):
        names = [_eagle3_name(name) for name in names]
    classes = VLLM_CLASSES if engine.name == "vllm" else SGLANG_CLASSES
    name = names[0] if names else None
    found, since = classes.get(name or "", (None, "0"))
    known = found is not None and engine.since(since)
    block = found if found is not None and known else _nearest(config)
    reads = {**_sizes(config), **_options(config, engine, block), **_rope(config)}
    return View(engine, name, known, block, config, reads)


def _nearest(config: Config) -> Block:
    """The block to read a config under whose class the engine does not have."""
    return "mla" if type(config.get("kv_lora_rank")) is int else "llama"


def _eagle3_name(name: str) -> str:
    """vLLM's EAGLEConfig: `X` becomes `Eagle3X` unless it starts or ends with Eagle3."""
    return name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"


def is_speculators(raw: Config) -> bool:
    return "speculators_model_type" in raw or isinstance(raw.get("transformer_layer_config"), Mapping)


def speculators_config(raw: Config, engine: Engine) -> Config:
    """What vLLM makes of the speculators format (configs/speculators/algos.py): the layer's config and a few keys more.

    `norm_before_residual` is true when absent; `fc_norm` and `norm_output` are passed on from 0.32; a qwen3 layer has a
    class of its own from 0.24. For P-EAGLE `norm_before_residual` is false when absent, and neither norm is passed on.
    """
    if not is_speculators(raw):
        return raw
    layer = raw.get("transformer_layer_config")
    config: dict[str, Any] = dict(layer) if isinstance(layer, Mapping) else {}
    config["draft_vocab_size"] = raw.get("draft_vocab_size")
    for key in ("target_hidden_size", IDS_KEY):
        if raw.get(key):
            config[key] = raw[key]
    peagle = method_of(raw) == "peagle"
    config["norm_before_residual"] = raw.get("norm_before_residual", not peagle)
    recent = engine.since("0.32") and not peagle
    passed = ("norm_before_fc", "fc_norm", "norm_output") if recent else ("norm_before_fc",)
    config |= {key: raw.get(key, False) for key in passed}
    qwen3 = config.get("model_type") == "qwen3" and engine.since("0.24")
    if peagle:
        name = "PeagleQwen3ForCausalLM" if qwen3 else "PeagleLlamaForCausalLM"
        return config | {"architectures": [name], "pard_token": mask_token_of(raw)}
    return config | {"architectures": ["Eagle3Qwen3ForCausalLM" if qwen3 else "Eagle3LlamaForCausalLM"]}


def find(config: Config, paths: Sequence[str], default: Any = None, *, truthy: bool = False) -> Read:
    """The first of `paths` (dots go one level in) that is there, and, with `truthy`, is not false."""
    for path in paths:
        holder: Any = config
        *outer, key = path.split(".")
        for part in outer:
            holder = holder.get(part) if isinstance(holder, Mapping) else None
        if isinstance(holder, Mapping) and key in holder and (holder[key] or not truthy):
            return Read(holder[key], path)
    return Read(default, "absent" if default is None else f"absent: {default!r}")


def never(value: Any, why: str) -> Read:
    """A setting this engine does not read: it always behaves as `value`."""
    return Read(value, f"not read: {why}")


def _sizes(config: Config) -> dict[str, Read]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    reads = {name: find(config, [name]) for name in (*names, *latent) if name in names or name in config}
    kind = str(config.get("model_type"))
    reads["num_hidden_layers"] = find(config, ["num_hidden_layers"], 32)
    reads["num_key_value_heads"] = find(config, ["num_key_value_heads"], reads["num_attention_heads"].value)
    hidden, heads = reads["hidden_size"].value, reads["num_attention_heads"].value
    per_head = hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None
    reads["head_dim"] = find(config, ["head_dim"], per_head, truthy=True)
    reads["target_hidden_size"] = find(config, ["target_hidden_size"], hidden)
    reads["draft_vocab_size"] = find(config, ["draft_vocab_size"])
    reads["max_position_embeddings"] = find(config, ["max_position_embeddings"], DEFAULT_CONTEXTS.get(kind, 2048))
    return reads


def _options(config: Config, engine: Engine, block: Block) -> dict[str, Read]:
    reads = _sglang_options(config, engine, block) if engine.name == "sglang" else _vllm_options(config, engine, block)
    reads["use_aux_hidden_state"] = find(config, ["eagle_config.use_aux_hidden_state"], True)
    return reads


def _sglang_options(config: Config, engine: Engine, block: Block) -> dict[str, Read]:
    mla, recent = block == "mla", engine.since("0.5.13" if block == "mla" else "0.5.12")
    return {
        "num_aux_hidden_states": _sglang_aux(config, engine, block),
        "fc_norm": find(config, ["fc_norm", "use_aux_norm"], False, truthy=True)
        if recent
        else never(False, "fc_norm came later"),
        "norm_output": find(config, ["norm_output"], False) if recent else never(False, "norm_output came later"),
        "norm_before_fc": never(False, "its MLA draft has no input_norm" if mla else "input_norm came in 0.5.17")
        if mla or not engine.since("0.5.17")
        else find(config, ["eagle_config.norm_before_fc", "norm_before_fc"], False),
        "norm_before_residual": never(False, "the residual is always taken before the norm"),
        "attention_bias": never(False, "its q, k and v never have biases"),
        "fc_bias": find(config, ["bias"], False),
        "sliding_window": never(None, "a window is the server's --speculative-draft-window-size"),
        "tie_word_embeddings": find(config, ["tie_word_embeddings"], False),
    }


def _sglang_aux(config: Config, engine: Engine, block: Block) -> Read:
    if block == "mla":
        return _length(config, [NESTED_IDS, IDS_KEY])
    if not engine.since("0.5.12"):
        return never(DEFAULT_AUX, "fc is always 3 states wide")
    named = find(config, ["num_aux_hidden_states"])
    return named if named.value is not None else _length(config, [NESTED_IDS])


def _length(config: Config, paths: Sequence[str]) -> Read:
    ids = find(config, paths, truthy=True)
    if isinstance(ids.value, list):
        return Read(len(ids.value), f"length of {ids.where}")
    return Read(DEFAULT_AUX, f"absent: {DEFAULT_AUX}")


def _vllm_options(config: Config, engine: Engine, block: Block) -> dict[str, Read]:
    recent = engine.since("0.24")
    before_fc = ["eagle_config.norm_before_fc", "norm_before_fc"] if recent else ["norm_before_fc"]
    later = never(False, "it came in 0.24")
    return {
        "num_aux_hidden_states": _vllm_aux(config, engine, block),
        "fc_norm": find(config, ["fc_norm"], False) if recent else later,
        "norm_output": find(config, ["norm_output"], False) if recent else later,
        "norm_before_fc": never(False, "its MLA draft has no input_norm")
        if block == "mla"
        else find(config, before_fc, False),
        "norm_before_residual": find(config, ["norm_before_residual"], False),
        "attention_bias": find(config, ["attention_bias"], False),
        "fc_bias": never(False, "fc never has a bias"),
        "sliding_window": _vllm_window(config, engine, block),
        "tie_word_embeddings": never(False, "the head is the draft's own, or the target's where the file has none"),
    }


def _vllm_aux(config: Config, engine: Engine, block: Block) -> Read:
    if not engine.since("0.24"):
        return never(DEFAULT_AUX, "fc is always 3 states wide")
    counts = ["num_aux_layers", "num_aux_hidden_states"] if block == "qwen3" else ["num_aux_hidden_states"]
    named = find(config, counts)
    if named.value is not None:
        return named
    return _length(config, [IDS_KEY, NESTED_IDS] if block == "qwen3" else [NESTED_IDS])


def _vllm_window(config: Config, engine: Engine, block: Block) -> Read:
    types = config.get("layer_types")
    if block == "mla" or (block == "qwen3" and not engine.since("0.32")):
        return never(None, "its draft of this block attends to everything")
    if not isinstance(types, list) or "sliding_attention" not in types:
        return Read(None, "no layer_types with sliding_attention: full attention")
    return find(config, ["sliding_window"])


def _rope(config: Config) -> dict[str, Read]:
    """transformers 5: a `rope_scaling` that is there replaces `rope_parameters`; the base is looked for in it first."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    inner = config.get(name)
    inner = inner if isinstance(inner, Mapping) else {}
    theta = find(config, [f"{name}.rope_theta", "rope_theta"], DEFAULT_THETA)
    kind = inner.get("rope_type", inner.get("type", "default"))
    scaling = {key: value for key, value in inner.items() if key not in ("rope_theta", "rope_type", "type")}
    return {"rope_theta": theta, "rope_scaling": Read({"rope_type": kind, **scaling}, name if inner else "absent")}
