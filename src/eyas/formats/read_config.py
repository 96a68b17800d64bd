"""What a draft's config.json is: whose format, which boundaries it means, and what an engine would trip over.

A list of layer ids is read in the numbering its place gives it: the `eyas` block holds boundaries; a top-level list is
read raw by all its readers (vLLM, speculators, llama.cpp); a nested list is SGLang's, whose trainers count outputs of
layers, so that it starts with 1 (or -1) by default. A nested list that starts otherwise has been published in both
numberings, so it is never guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from eyas.errors import InputError
from eyas.formats.config_problems import (
    SHARED_CLASSES,
    VLLM_CLASSES,
    Config,
    architectures,
    foreign_problems,
    key_disagreements,
    layer_of,
    residual_default,
    tap_disagreements,
)
from eyas.formats.draft_config import FORMAT, LATENT_KEYS, DraftConfig, TargetIdentity, invalid
from eyas.formats.methods import PEAGLE_CLASSES, MethodName, mask_token_of, method_of
from eyas.formats.problem import Problem
from eyas.formats.taps import IDS_KEY, TapKeys, default_boundaries
from eyas.formats.targets import FIRST_ID_RULE

DRAFT_KEYS = frozenset({"eyas", "speculators_model_type", "eagle_config", IDS_KEY, "draft_vocab_size"})
MLA_CLASSES = frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"})
QWEN3_CLASSES = frozenset({"Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM"})
SPECULATORS_CLASSES = frozenset({"Eagle3Speculator", "Eagle3DraftModel", "PEagleSpeculator"})
MODELOPT_KEYS = frozenset({"use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm"})


@dataclass(frozen=True)
class DraftFile:
    """What a config.json says of a draft; None where it does not say."""

    format: str
    """eyas, speculators, modelopt, angelslim, specforge (SGLang's class; TorchSpec too), vllm, eagle or unknown."""
    keys: TapKeys
    boundaries: tuple[int, ...] | None
    boundaries_source: str
    ids_ambiguous: bool
    target_type: str | None
    target_layers: int | None
    method: MethodName = "eagle3"
    config: DraftConfig | None = None
    target: TargetIdentity | None = None
    problems: tuple[Problem, ...] = field(default=())


def is_draft(raw: Config) -> bool:
    """Whether a config.json is a draft's rather than a target's."""
    return bool(DRAFT_KEYS & raw.keys()) or any("Eagle" in name for name in architectures(raw))


def read_config(raw: Config, target: TargetIdentity | None = None) -> DraftFile:
    """Read a draft's config.json. `target`, where known, supplies depth, width and class to formats that lack them.

    Raises InputError for an `eyas` block of a newer format or that does not validate.
    """
    return _read_foreign(raw, target) if raw.get("eyas") is None else _read_eyas(raw)


def format_of(raw: Config) -> str:
    """Whose config.json this is, by what only they write."""
    names, nested = set(architectures(raw)), raw.get("eagle_config")
    if raw.get("eyas") is not None:
        return "eyas"
    if "speculators_model_type" in raw or names & SPECULATORS_CLASSES:
        return "speculators"
    if isinstance(nested, Mapping) and MODELOPT_KEYS & nested.keys():
        return "modelopt"
    if not names and "hidden_size" not in raw:
        return "modelopt"  # its recipes override a few keys of a default
    if "Eagle3LlamaForCausalLM" in names and {"target_model_type", "modal_type"} & raw.keys():
        return "angelslim"
    if names & (SHARED_CLASSES | PEAGLE_CLASSES):
        return "specforge"
    if names & VLLM_CLASSES:
        return "vllm"
    return "eagle" if "draft_vocab_size" in raw else "unknown"


def _read_eyas(raw: Config) -> DraftFile:
    block = raw["eyas"]
    if not isinstance(block, Mapping):
        raise InputError(
            wanted="an eyas block with a whole draft and target",
            got=repr(block),
            where="config.json: eyas",
            next="export the draft again",
            code="config_key_wrong",
        )
    if block.get("format") != FORMAT:
        raise InputError(
            wanted=f"an eyas block of format {FORMAT}",
            got=f"format {block.get('format')!r}",
            where="config.json: eyas",
            next="pip install --upgrade eyas",
        )
    try:
        config = DraftConfig.model_validate(block.get("draft"))
        target = None if block.get("target") is None else TargetIdentity.model_validate(block["target"])
    except ValidationError as error:
        wanted = "an eyas block with a whole draft and target"
        raise invalid(error, wanted, "config.json: eyas", "export the draft again") from error
    return DraftFile(
        format="eyas",
        keys=TapKeys.of(raw),
        boundaries=config.boundaries,
        boundaries_source="the eyas block",
        ids_ambiguous=False,
        target_type=config.target_model_type,
        target_layers=config.target_num_hidden_layers,
        method=config.method,
        config=config,
        target=target,
        problems=(*key_disagreements(raw, config), *tap_disagreements(raw, config)),
    )


def _read_foreign(raw: Config, target: TargetIdentity | None) -> DraftFile:
    keys, name = TapKeys.of(raw), format_of(raw)
    target_type = target.model_type if target else _target_type(raw)
    layers = target.num_hidden_layers if target else None
    boundaries, source, ambiguous = _boundaries(keys, layers, target_type)
    problems = list(foreign_problems(raw, name))
    if ambiguous:
        places = " in both places" if keys.top else ""
        problems.append(
            Problem(
                "ids_ambiguous",
                where=IDS_KEY if keys.top else f"eagle_config.{IDS_KEY}",
                expected="a list whose numbering is known",
                found=f"{list(keys.nested or ())}{places}: boundaries, or outputs of layers (one lower)",
                fix="measure it: eyas check --draft DRAFT --captures CAPTURES",
            )
        )
    config = None if boundaries is None or target is None else _draft_config(raw, boundaries, target)
    return DraftFile(
        name, keys, boundaries, source, ambiguous, target_type, layers, method_of(raw), config, target, tuple(problems)
    )


def _target_type(raw: Config) -> str | None:
    """The target's model_type where the draft's config names it (AngelSlim, SpecForge's VLM drafts)."""
    named = raw.get("target_model_type")
    return {"qwen2.5": "qwen2"}.get(named, named) if isinstance(named, str) else None


def _boundaries(keys: TapKeys, layers: int | None, target_type: str | None) -> tuple[tuple[int, ...] | None, str, bool]:
    """Boundaries, where they come from, and whether ids were found whose numbering is unknown."""
    if not keys.use_aux:
        return None, "no taps: use_aux_hidden_state is false, the last normed state is fed", False
    if keys.top and keys.top == keys.nested and not _plainly_boundaries(keys.top, layers, target_type):
        return None, f"the same {IDS_KEY} at the top and in eagle_config, whose readers count differently", True
    if keys.top:
        return tuple(sorted(set(keys.top))), f"top-level {IDS_KEY}: boundaries for all its readers", False
    if () in (keys.top, keys.nested) and not keys.nested:
        return None, "an empty list of ids, which SGLang reads as no state and vLLM as its default", False
    if not keys.nested:
        default = default_boundaries(layers, where="config.json") if layers is not None and layers >= 7 else None
        return default, "no ids: every engine takes its default [2, n//2, n-3]", False
    first, largest = min(keys.nested), max(keys.nested)
    if layers is not None and first == 1 and {layers // 2, layers - 3} <= set(keys.nested):
        return None, f"eagle_config.{IDS_KEY} starts as outputs do and goes on as the default boundaries do", True
    if first in (1, -1) and largest != layers:
        boundaries = tuple(sorted({layer + 1 for layer in keys.nested}))
        return boundaries, f"eagle_config.{IDS_KEY} starting with {first}: outputs of layers, boundary = id + 1", False
    if largest == layers and first >= 0:
        return tuple(sorted(set(keys.nested))), f"eagle_config.{IDS_KEY} reaching n: boundaries", False
    return None, f"eagle_config.{IDS_KEY}: its numbering is not known", True


def _plainly_boundaries(ids: tuple[int, ...], layers: int | None, target_type: str | None) -> bool:
    """Whether one list for both readers is surely boundaries: it starts as the default's do, reaches n, or its target
    is of the classes for which SGLang reads boundaries too."""
    return min(ids) == 2 or max(ids) == layers or (target_type in FIRST_ID_RULE and min(ids) != 1)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _block(raw: Config, layer: Config) -> str:
    """The block a config.json names by its class; an MLA layer by its keys too (speculators, a target's class name)."""
    if MLA_CLASSES & set(architectures(raw)) or type(layer.get("kv_lora_rank")) is int:
        return "mla"
    return "qwen3" if QWEN3_CLASSES & set(architectures(raw)) else "llama"


def _draft_config(raw: Config, boundaries: tuple[int, ...], target: TargetIdentity) -> DraftConfig | None:
    """The DraftConfig of a foreign file for a known target; None where a size it needs is absent or does not fit."""
    layer = layer_of(raw)
    rope, eagle = _mapping(layer.get("rope_parameters")), _mapping(raw.get("eagle_config"))
    inner = {key: value for key, value in rope.items() if key != "rope_theta"}
    scaling = _mapping(layer.get("rope_scaling")) or inner
    heads, hidden = layer.get("num_attention_heads"), layer.get("hidden_size")
    values = {
        "boundaries": boundaries,
        "target_num_hidden_layers": target.num_hidden_layers,
        "target_hidden_size": raw.get("target_hidden_size") or target.hidden_size,
        "target_model_type": target.model_type,
        "head_dim": hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "norm_before_residual": raw.get("norm_before_residual", residual_default(raw, format_of(raw))),
        "norm_before_fc": bool(eagle.get("norm_before_fc") or raw.get("norm_before_fc")),
        "fc_norm": bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
        "norm_output": bool(raw.get("norm_output")) and method_of(raw) == "eagle3",  # else nothing is fed back
        "method": method_of(raw),
        "mask_token_id": mask_token_of(raw),
        "rope_scaling": scaling if scaling.get("rope_type", scaling.get("type")) not in (None, "default") else None,
        "fc_bias": bool(raw.get("bias")),
        "block": _block(raw, layer),
        "max_position_embeddings": 2048,  # transformers' own where the key is absent; DeepSeek's is longer
    }
    if values["block"] == "mla":
        values |= {"latent": {key: layer.get(key) for key in LATENT_KEYS}, "max_position_embeddings": 4096}
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_theta", "attention_bias"):  # fmt: skip
        if layer.get(key) is not None:
            values[key] = layer[key]
    if values["block"] == "mla":  # published files leave both out, or say them of a cache of heads
        values |= {"head_dim": layer.get("qk_rope_head_dim"), "num_key_value_heads": heads}
    if raw.get("draft_vocab_size") is not None:
        values["draft_vocab_size"] = raw["draft_vocab_size"]
    try:
        return DraftConfig.model_validate(values)
    except (ValidationError, InputError):
        return None
