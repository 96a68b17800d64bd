"""One table of tensor names: the canonical ones (those of `models/draft.py`) and how everyone else spells them.

Canonical: `fc.weight`, `layers.0.self_attn.q_proj.weight`, `fc_norm.0.weight`, `norm.weight`, `lm_head.weight`, `d2t`.
Sources: SGLang 0.5.23 models/llama_eagle3.py, vLLM 0.33 llama_eagle3.py, SpecForge a6b6b02, speculators 0.9.0, ModelOpt
hf_spec_export.py, as read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eyas.formats.draft_config import DraftConfig, LatentShape
from eyas.formats.methods import METHODS
from eyas.formats.problem import Problem

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Spelling:
    """How a writer spells the canonical names of a one-layer draft."""

    prefix: str = ""
    """Before every name but `lm_head`, `d2t` and `t2d`, which stay at the top level."""
    first_layer: str = "layers.0."
    aux_norms: bool = False
    """Three tap norms called aux_norm_low, aux_norm_mid, aux_norm_high instead of fc_norm.0, .1, .2."""


WRITERS: dict[str, Spelling] = {
    "eyas": Spelling(),
    "eagle": Spelling(first_layer="midlayer."),
    "specforge": Spelling(first_layer="midlayer."),
    "torchspec": Spelling(first_layer="midlayer."),
    "angelslim": Spelling(first_layer="midlayer."),
    "speculators": Spelling(),
    "modelopt": Spelling(),
    "nemo": Spelling(prefix="model."),
    "legacy": Spelling(first_layer="midlayer.", aux_norms=True),
    "sglang": Spelling(first_layer="midlayer."),
    "vllm": Spelling(first_layer="midlayer."),
}
"""The last two are what Eyas writes for the engines: every known release of both reads un-prefixed `midlayer.*`."""

AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
TOP_LEVEL = ("lm_head.", "d2t", "t2d")
PREFIXES = ("draft_model.", "model.")


def canonical_name(name: str) -> str:
    """The canonical spelling of anyone's tensor name; a name nobody uses comes back as it is."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    for index, aux in enumerate(AUX_NORMS):
        name = re.sub(rf"^{aux}\.", f"fc_norm.{index}.", name)
    return name


def spell(name: str, writer: str) -> str:
    """`writer`'s spelling of a canonical name."""
    spelling = WRITERS[writer]
    if name.startswith("layers.0."):
        name = spelling.first_layer + name.removeprefix("layers.0.")
    if spelling.aux_norms and name.startswith("fc_norm."):
        index, rest = name.removeprefix("fc_norm.").split(".", 1)
        name = f"{AUX_NORMS[int(index)]}.{rest}"
    return name if name.startswith(TOP_LEVEL) else spelling.prefix + name


def twin(name: str) -> str | None:
    """The canonical tensor whose values `name` must repeat, or None.

    In layers after the first SGLang norms the state with `hidden_norm`, vLLM with `input_layernorm`: an export that
    serves both stores one tensor under both names.
    """
    match = re.fullmatch(r"layers\.([1-9]\d*)\.hidden_norm\.weight", name)
    return f"layers.{match[1]}.input_layernorm.weight" if match else None


def expected_tensors(config: DraftConfig) -> dict[str, Shape]:
    """Canonical name to shape of every tensor a checkpoint of `config` holds .

    The embedding is there only if the draft owns it, d2t and t2d only for a reduced vocabulary.
    """
    hidden, taps = config.hidden_size, len(config.boundaries)
    shapes: dict[str, Shape] = {"fc.weight": (hidden, config.taps_width)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.taps_width,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(taps)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(config, layer).items()}
    shapes |= dict.fromkeys(METHODS[config.method].tensors, (1, 1, config.taps_width))
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.reduced_vocabulary:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def _layer(config: DraftConfig, layer: int) -> dict[str, Shape]:
    hidden, width, mlp = config.hidden_size, config.hidden_size * (2 if layer == 0 else 1), config.intermediate_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if layer == 0:
        shapes["hidden_norm.weight"] = (hidden,)
    attention = _heads(config, width) if config.latent is None else _latent(config, config.latent, width)
    shapes |= {f"self_attn.{name}": shape for name, shape in attention.items()}
    return shapes | {
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }


def _heads(config: DraftConfig, width: int) -> dict[str, Shape]:
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, Shape] = {}
    for name, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        shapes[f"{name}.weight"] = (rows, width)
        if config.attention_bias:
            shapes[f"{name}.bias"] = (rows,)
    shapes["o_proj.weight"] = (config.hidden_size, heads)
    if config.attention_bias and config.block == "llama":
        shapes["o_proj.bias"] = (config.hidden_size,)
    if config.block == "qwen3":
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    return shapes


def _latent(config: DraftConfig, latent: LatentShape, width: int) -> dict[str, Shape]:
    heads, q_rank, kv_rank = config.num_attention_heads, latent.q_lora_rank, latent.kv_lora_rank
    return {
        "q_a_proj.weight": (q_rank, width),
        "q_a_layernorm.weight": (q_rank,),
        "q_b_proj.weight": (heads * latent.qk_head_dim, q_rank),
        "kv_a_proj_with_mqa.weight": (kv_rank + latent.qk_rope_head_dim, width),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (heads * (latent.qk_nope_head_dim + latent.v_head_dim), kv_rank),
        "o_proj.weight": (config.hidden_size, heads * latent.v_head_dim),
    }


def exported_names(config: DraftConfig, writer: str = "sglang") -> dict[str, str]:
    """Exported name to the canonical tensor stored under it, twins included.

    `midlayer.*` for one layer, `layers.N.*` for more (where a reader would not know which layer is meant).
    """
    spelled = writer if config.num_hidden_layers == 1 else "eyas"
    names = {spell(name, spelled): name for name in expected_tensors(config)}
    twins = [f"layers.{layer}.hidden_norm.weight" for layer in range(1, config.num_hidden_layers)]
    return names | {name: source for name in twins if (source := twin(name))}


def canonical_shapes(shapes: Mapping[str, Shape | None]) -> dict[str, Shape | None]:
    """A checkpoint's shapes under canonical names."""
    return {canonical_name(name): shape for name, shape in shapes.items()}


def check_tensors(config: DraftConfig, shapes: Mapping[str, Shape | None], where: str) -> list[Problem]:
    """What is missing, unexpected or mis-shaped in a checkpoint (names in any spelling; shape None: not known).

    A missing t2d is no problem for serving: it follows from d2t. A missing d2t is `d2t_missing`.
    """
    expected, found = expected_tensors(config), canonical_shapes(shapes)
    problems = [_missing(name, where) for name in expected if name not in found and name != "t2d"]
    for name, shape in found.items():
        wanted = expected.get(twin(name) or name)
        if wanted is None:
            problems.append(_unexpected(name, config, where))
        elif shape is not None and shape != wanted:
            problems.append(
                Problem(
                    "shape_mismatch",
                    where=f"{where}: {name}",
                    expected=str(list(wanted)),
                    found=str(list(shape)),
                    fix="make config.json and the tensors agree",
                )
            )
    return problems


def _missing(name: str, where: str) -> Problem:
    return Problem(
        "d2t_missing" if name == "d2t" else "tensor_missing",
        where=f"{where}: {name}",
        expected=f"tensor {name}",
        found="absent: SGLang and vLLM load without a word and leave it random, or the identity for d2t",
        fix="export the draft again from its training checkpoint",
    )


def _unexpected(name: str, config: DraftConfig, where: str) -> Problem:
    bias = name.endswith(".bias")
    identity = name in {"d2t", "t2d"} and not config.reduced_vocabulary
    milder = "info" if identity else "warning" if name == "embed_tokens.weight" else None
    return Problem(
        "bias_dropped" if bias else "tensor_unexpected",
        where=f"{where}: {name}",
        expected="only tensors that config.json accounts for",
        found=f"{name}: SGLang drops it in silence, vLLM " + ("too" if bias else "refuses to start"),
        fix="set the option it belongs to, or leave the tensor out",
        severity=milder,
    )


def spelling_of(names: Iterable[str]) -> str:
    """`midlayer`, `layers` or `none`, with `model.` before it where names carry that prefix."""
    listed = list(names)
    bare = [name.removeprefix("model.") for name in listed]
    kind = "midlayer" if any(name.startswith("midlayer.") for name in bare) else "none"
    if any(name.startswith("layers.") for name in bare):
        kind = "layers"
    return f"model.{kind}" if bare != listed else kind
