"""What an engine would trip over in a draft's config.json: keys absent, misplaced, or at odds with the `eyas` block.

Sources: SGLang 0.5.23 and vLLM 0.33, as read (docs/dialects.md).
"""

from collections.abc import Mapping
from typing import Any

from eyas.formats.config_json import to_json
from eyas.formats.draft_config import DraftConfig
from eyas.formats.engines import parse_engine, releases
from eyas.formats.methods import PEAGLE_CLASSES, mask_token_of, method_of
from eyas.formats.problem import Problem
from eyas.formats.taps import IDS_KEY, TapKeys, captures

Config = Mapping[str, Any]

SHARED_CLASSES = frozenset({"LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"})
VLLM_CLASSES = PEAGLE_CLASSES | {
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM",
}


def layer_of(raw: Config) -> Config:
    """The keys of the decoder layer: nested in the speculators format, at the top elsewhere."""
    nested = raw.get("transformer_layer_config")
    return nested if isinstance(nested, Mapping) else raw


def architectures(raw: Config) -> list[str]:
    """The class names of a config.json."""
    names = raw.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def residual_default(raw: Config, name: str) -> bool:
    """norm_before_residual where a file of format `name` lacks the key (vLLM's readers of speculators': by method)."""
    return name == "speculators" and method_of(raw) == "eagle3"


CODE_OF_KEY = {
    "rope_theta": "rope_theta",
    "rope_parameters": "rope_scaling",
    "rope_scaling": "rope_scaling",
    "vocab_size": "vocab_mismatch",
    "draft_vocab_size": "vocab_mismatch",
    "tie_word_embeddings": "tied_head",
    "fc_norm": "fc_norm",
    "norm_before_fc": "fc_norm",
    "norm_output": "feedback_norm",
    "norm_before_residual": "residual_norm",
    "max_position_embeddings": "context_too_short",
    "sliding_window": "sliding_window",
    "architectures": "architecture_unknown",
}
NOT_COMPARED = frozenset({"eyas", "torch_dtype", "eagle_config", IDS_KEY, "use_cache"})


def key_disagreements(raw: Config, config: DraftConfig) -> list[Problem]:
    """Keys an engine reads whose value is not what the eyas block says the draft is."""
    return [
        Problem(
            CODE_OF_KEY.get(key, "config_key_wrong"),
            where=key,
            expected=f"{value!r}, as the eyas block says",
            found=repr(raw[key]),
            fix="export the draft again, or mend the key",
            severity="error",
        )
        for key, value in to_json(config, {}).items()
        if key in raw and key not in NOT_COMPARED and raw[key] != value
    ]


def tap_disagreements(raw: Config, config: DraftConfig) -> list[Problem]:
    """Engines that would capture other boundaries than the eyas block names."""
    keys = TapKeys.of(raw)
    if keys.top is None and keys.nested is None:
        return [
            Problem(
                "config_key_missing",
                where=IDS_KEY,
                expected="layer ids for the engines",
                found="none: this is a training checkpoint",
                fix="eyas export writes the folder that engines read",
                severity="info",
            )
        ]
    engines = [parse_engine("vllm"), parse_engine("vllm/v1"), *reversed(releases("sglang"))]
    differing: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for engine in engines:
        found = captures(engine, keys, config.target_model_type, config.target_num_hidden_layers)
        if found.boundaries is not None and found.boundaries != config.boundaries:
            differing.setdefault((found.boundaries, found.rule), []).append(str(engine))
    newest = {str(engines[0]), str(engines[1]), str(engines[2])}
    return [
        Problem(
            "tap_offset",
            where=f"{', '.join(readers)}: layer ids",
            expected=f"boundaries {list(config.boundaries)}, as the eyas block says",
            found=f"{list(boundaries)} ({rule})",
            fix="export the draft again for this engine" if newest & set(readers) else "serve with a newer release",
            severity="error" if newest & set(readers) else "info",
        )
        for (boundaries, rule), readers in differing.items()
    ]


def foreign_problems(raw: Config, name: str) -> list[Problem]:
    """What is wrong or risky in a config.json that Eyas did not write; `name` is its format."""
    return [*_id_problems(raw), *_key_problems(raw), *_wiring_problems(raw, name), *_method_problems(raw)]


def _id_problems(raw: Config) -> list[Problem]:
    keys, problems = TapKeys.of(raw), []
    taps = keys.top or keys.nested
    if raw.get(IDS_KEY) is not None and keys.top is None:
        problems.append(
            _problem("config_key_wrong", IDS_KEY, "a list of integers", repr(raw.get(IDS_KEY)), "write layer ids")
        )
    if taps is None and keys.use_aux:
        problems.append(
            _problem("config_key_missing", IDS_KEY, "layer ids", "none: engines take [2, n//2, n-3]", "write them")
        )
    if taps is not None and (keys.top is None or keys.nested is None):
        nested_only = keys.top is None
        where = f"eagle_config.{IDS_KEY}" if nested_only else IDS_KEY
        losers = "vLLM's V2 runner and llama.cpp take their" if nested_only else "SGLang takes its"
        found = f"{'nested' if nested_only else 'top level'} only: {losers} default"
        fix = "eyas export writes both, each in its reader's numbering"
        problems.append(_problem("ids_ignored", where, "ids in both places", found, fix, "warning"))
    if taps is not None and len(taps) != 3 and keys.nested is None and "num_aux_hidden_states" not in raw:
        found = "absent: vLLM's Llama draft builds fc for 3"
        problems.append(
            _problem("config_key_missing", "num_aux_hidden_states", f"{len(taps)}", found, "write it", "error")
        )
    return problems


def _key_problems(raw: Config) -> list[Problem]:
    layer, problems = layer_of(raw), []
    if "target_hidden_size" in raw and raw["target_hidden_size"] is None:
        found = "null, which SGLang multiplies"
        problems.append(_problem("config_key_wrong", "target_hidden_size", "an integer, or no key", found, "remove it"))
    if "draft_vocab_size" not in raw:
        found = "absent: SGLang stops at start"
        problems.append(_problem("config_key_missing", "draft_vocab_size", "the key", found, "write it"))
    if raw.get("tie_word_embeddings") is True:
        found = "true: the embedding takes the place of the draft's head"
        problems.append(_problem("tied_head", "tie_word_embeddings", "false", found, "write false"))
    if layer.get("rope_theta") is None and not isinstance(layer.get("rope_parameters"), Mapping):
        found = "absent: engines take 10000"
        problems.append(_problem("rope_theta", "rope_theta", "the base of training", found, "write it", "warning"))
    return problems


def _wiring_problems(raw: Config, name: str) -> list[Problem]:
    layer, names, problems = layer_of(raw), set(architectures(raw)), []
    if not names & SHARED_CLASSES:
        milder = "warning" if names & VLLM_CLASSES or name == "speculators" else "error"
        expected = f"one of {', '.join(sorted(SHARED_CLASSES))}, known to SGLang and vLLM"
        fix = "eyas export writes the name both know"
        problems.append(_problem("architecture_unknown", "architectures", expected, str(sorted(names)), fix, milder))
    if raw.get("norm_before_residual", residual_default(raw, name)) is True:
        found = "true" + ("" if "norm_before_residual" in raw else " (the default of the speculators format)")
        fix = "serve with vLLM, or train without it"
        problems.append(_problem("residual_norm", "norm_before_residual", "false, for SGLang", found, fix, "warning"))
    if name == "specforge" and raw.get("norm_output") is True:
        found = "true: SpecForge up to 0.2.0 trains on h fed back whatever this says; engines then feed norm(h)"
        fix = "eyas check --draft DRAFT --captures CAPTURES measures which; false if h it was (PR 879 mends SpecForge)"
        problems.append(_problem("feedback_norm", "norm_output", "what training fed back", found, fix, "warning"))
    if layer.get("use_sliding_window") is True:
        found = f"{layer.get('sliding_window')}: SGLang has it by a server flag only"
        expected = "a window that every engine applies"
        fix = "--speculative-draft-window-size in SGLang; layer_types names it for vLLM"
        problems.append(_problem("sliding_window", "sliding_window", expected, found, fix, "warning"))
    return problems


def _method_problems(raw: Config) -> list[Problem]:
    if method_of(raw) != "peagle":
        return []
    found = "P-EAGLE, whose tokens are drafted in one forward: SGLang has no such method"
    fix = 'serve with vLLM, --speculative-config {"method": "eagle3", "parallel_drafting": true, ...}'
    problems = [_problem("algorithm_mismatch", "method", "EAGLE-3, for SGLang", found, fix, "warning")]
    if mask_token_of(raw) is None:
        found = "absent: vLLM stops at start"
        fix = "write the id that the draft was trained with"
        problems.append(_problem("config_key_missing", "mask_token_id", "the key", found, fix, "error"))
    return problems


def _problem(code: str, where: str, expected: str, found: str, fix: str, severity: str | None = None) -> Problem:
    return Problem(code, where=where, expected=expected, found=found, fix=fix, severity=severity)
