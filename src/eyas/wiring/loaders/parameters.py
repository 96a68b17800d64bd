"""The parameters an engine's draft class builds, and what its loader does with each tensor of a checkpoint. No torch.

Sources, as read: `load_weights` of SGLang 0.5.11 to 0.5.23 models/llama_eagle3.py and kimi_k25_eagle3.py, and of vLLM
0.20 to 0.33 {llama,qwen3,deepseek}_eagle3.py with models/utils.py AutoWeightsLoader. Neither compares what it loaded
with what the model has: a parameter no tensor names stays random.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from eyas.formats.methods import MASK_HIDDEN, method_of
from eyas.formats.names import AUX_NORMS, Shape
from eyas.wiring.loaders.view import View

Known = Shape | None
LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


@dataclass
class Fates:
    """What becomes of a checkpoint's tensors. Parameters are named as in `models/draft.py`."""

    loaded: dict[str, str] = field(default_factory=dict)
    """Tensor name to parameter; d2t among them."""
    skipped: list[str] = field(default_factory=list)
    """Not needed and not missed: t2d."""
    dropped: list[str] = field(default_factory=list)
    """Unknown to the engine and dropped in silence."""
    refused: list[str] = field(default_factory=list)
    """Unknown to the engine, which stops at start."""
    missing: list[str] = field(default_factory=list)
    """Parameters that no tensor fills: they stay random."""
    defaulted: dict[str, str] = field(default_factory=dict)
    """Parameters that no tensor fills and what stands in for them."""


def parameters(view: View) -> dict[str, Known]:
    """Parameter to shape (None where a size is not in the config) of the draft class, embedding and head included."""
    hidden, fan_in = (
        view.get("hidden_size"),
        _product(view.get("target_hidden_size"), view.get("num_aux_hidden_states")),
    )
    shapes: dict[str, Known] = {"norm.weight": _shape(hidden)}
    if view.get("use_aux_hidden_state") is not False or view.engine.name == "sglang":
        shapes["fc.weight"] = _shape(hidden, fan_in)
        if view.get("fc_bias"):
            shapes["fc.bias"] = _shape(hidden)
        if view.get("norm_before_fc"):
            shapes["input_norm.weight"] = _shape(fan_in)
        if view.get("fc_norm"):
            count = view.get("num_aux_hidden_states")
            width = _shape(view.get("target_hidden_size"))
            shapes |= {f"fc_norm.{index}.weight": width for index in range(count if type(count) is int else 3)}
    layers = view.get("num_hidden_layers")
    for layer in range(min(layers, 64) if type(layers) is int else 1):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(view, layer).items()}
    shapes["embed_tokens.weight"] = _shape(view.get("vocab_size"), hidden)
    # vLLM has a place for it where parallel_drafting is set, which a P-EAGLE draft is served with
    if view.engine.name == "vllm" and view.block != "mla" and method_of(view.config) == "peagle":
        shapes[MASK_HIDDEN] = None
    if not view.get("tie_word_embeddings"):
        rows = view.get("draft_vocab_size") or view.get("vocab_size")
        shapes["lm_head.weight"] = _shape(rows, hidden)
    return shapes


def _product(a: object, b: object) -> int | None:
    return a * b if type(a) is int and type(b) is int else None


def _shape(*sizes: object) -> Known:
    known = tuple(size for size in sizes if type(size) is int)
    return known if len(known) == len(sizes) else None


def _layer(view: View, layer: int) -> dict[str, Known]:
    hidden, mlp = view.get("hidden_size"), view.get("intermediate_size")
    width = _product(hidden, 2 if layer == 0 else 1)
    shapes: dict[str, Known] = {f"{name}.weight": _shape(hidden) for name in LAYER_NORMS}
    shapes |= _latent(view, width) if view.block == "mla" else _heads(view, width)
    return shapes | {
        "mlp.gate_proj.weight": _shape(mlp, hidden),
        "mlp.up_proj.weight": _shape(mlp, hidden),
        "mlp.down_proj.weight": _shape(hidden, mlp),
    }


def _heads(view: View, width: int | None) -> dict[str, Known]:
    dim = view.get("head_dim")
    queries, keys = _product(view.get("num_attention_heads"), dim), _product(view.get("num_key_value_heads"), dim)
    shapes: dict[str, Known] = {}
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes[f"self_attn.{name}.weight"] = _shape(rows, width)
        if view.get("attention_bias"):
            shapes[f"self_attn.{name}.bias"] = _shape(rows)
    shapes["self_attn.o_proj.weight"] = _shape(view.get("hidden_size"), queries)
    if view.get("attention_bias") and view.block != "qwen3":  # vLLM's Llama block, which its draft inherits
        shapes["self_attn.o_proj.bias"] = _shape(view.get("hidden_size"))
    if view.block == "qwen3":
        shapes |= {"self_attn.q_norm.weight": _shape(dim), "self_attn.k_norm.weight": _shape(dim)}
    return shapes


def _latent(view: View, width: int | None) -> dict[str, Known]:
    hidden, heads = view.get("hidden_size"), view.get("num_attention_heads")
    q_rank, kv_rank = view.get("q_lora_rank"), view.get("kv_lora_rank")
    nope, rope, value = (view.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        "self_attn.q_a_proj.weight": _shape(q_rank, width),
        "self_attn.q_a_layernorm.weight": _shape(q_rank),
        "self_attn.q_b_proj.weight": _shape(_product(heads, _sum(nope, rope)), q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": _shape(_sum(kv_rank, rope), width),
        "self_attn.kv_a_layernorm.weight": _shape(kv_rank),
        "self_attn.kv_b_proj.weight": _shape(_product(heads, _sum(nope, value)), kv_rank),
        "self_attn.o_proj.weight": _shape(hidden, _product(heads, value)),
    }


def _sum(a: object, b: object) -> int | None:
    return a + b if type(a) is int and type(b) is int else None


# Loading ----------------------------------------------------------------------------------------------------------


def fates(view: View, names: Iterable[str]) -> Fates:
    """What `view.engine` does with tensors of these names."""
    built, result = parameters(view), Fates()
    for name in names:
        _place(view, name, built, result)
    filled = set(result.loaded.values())
    for parameter in built:
        if parameter not in filled and not _unused(view, parameter):
            stand_in = _stand_in(view, parameter)
            if stand_in:
                result.defaulted[parameter] = stand_in
            else:
                result.missing.append(parameter)
    return result


def _place(view: View, name: str, built: dict[str, Known], result: Fates) -> None:
    if "t2d" in name:
        result.skipped.append(name)
    elif "d2t" in name:
        _place_table(view, name, result)
    elif (parameter := _parameter(view, name, built)) is not None:
        result.loaded[name] = parameter
    elif _forgiven(view, name):
        result.dropped.append(name)
    else:
        result.refused.append(name)


def _place_table(view: View, name: str, result: Fates) -> None:
    """vLLM from 0.32 has no table where the draft vocabulary is the whole one, and stops on a tensor for it."""
    rows, total = view.get("draft_vocab_size"), view.get("vocab_size")
    whole = total is not None and (rows is None or rows == total)
    if view.engine.name == "vllm" and view.engine.since("0.32") and whole:
        result.refused.append(name)
    else:
        result.loaded[name] = "d2t"


def _parameter(view: View, name: str, built: dict[str, Known]) -> str | None:
    """The parameter that a tensor of this name fills, or None."""
    rule = {("sglang", "llama"): _sglang_llama, ("sglang", "mla"): _sglang_mla}.get(
        (view.engine.name, view.block or ""), _vllm
    )
    found = rule(view, name)
    return found if found in built else None


def _sglang_llama(view: View, name: str) -> str | None:
    """Any name with or without one `model.`; `midlayer` only in 0.5.11, any spelling after."""
    if view.engine.since("0.5.12"):
        name = name.replace("midlayer", "layers.0")
        for index, aux in enumerate(AUX_NORMS):
            name = name.replace(aux, f"fc_norm.{index}")
    elif re.match(r"(model\.)?layers\.", name):
        return None
    else:
        name = name.replace("midlayer.", "layers.0.")
    if name == "lm_head.weight":
        return name
    bare = name.removeprefix("model.")
    return None if bare.startswith("lm_head.") else bare


def _sglang_mla(view: View, name: str) -> str | None:
    """`model.` is always put before a name, so a name that has it already is not found."""
    return None if name.startswith("model.") else re.sub(r"^midlayer\.", "layers.0.", name)


def _vllm(view: View, name: str) -> str | None:
    """As SGLang's MLA loader: names must not start with `model.`."""
    return None if name.startswith("model.") else name.replace("midlayer.", "layers.0.")


def _forgiven(view: View, name: str) -> bool:
    """Whether an unknown name is dropped in silence rather than refused."""
    if view.engine.name == "sglang" or "rotary_emb.inv_freq" in name:
        return True
    if name == MASK_HIDDEN and view.block != "mla":
        return True  # with a warning
    if "input_norm." in name and not view.get("norm_before_fc") and view.block != "mla":
        return True
    if view.get("use_aux_hidden_state") is False and "fc." in name:
        return True
    if not view.engine.since("0.32"):
        return view.block == "mla"
    return name.endswith(".bias") and not name.startswith("model.")


def _unused(view: View, parameter: str) -> bool:
    """Built but never used: in layers after the first, SGLang leaves input_layernorm, vLLM hidden_norm, aside."""
    idle = "input_layernorm" if view.engine.name == "sglang" else "hidden_norm"
    return re.fullmatch(rf"layers\.[1-9]\d*\.{idle}\.weight", parameter) is not None


def _stand_in(view: View, parameter: str) -> str | None:
    """What an engine puts where the file has no tensor; None: nothing, it stays random."""
    same_width = view.get("target_hidden_size") == view.get("hidden_size")
    if parameter == "embed_tokens.weight":
        return "the target's embedding" if same_width or view.engine.name == "vllm" else None
    if parameter != "lm_head.weight":
        return (
            "fc is not applied" if parameter.startswith("fc.") and view.get("use_aux_hidden_state") is False else None
        )
    rows, total = view.get("draft_vocab_size"), view.get("vocab_size")
    if view.engine.name == "sglang":
        return "the target's head" if rows is None else None
    return "the target's head" if rows is None or rows == total else None
