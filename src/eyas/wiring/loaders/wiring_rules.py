"""Where the taps, widths, norms and rope that an engine takes are not the draft's. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from eyas.errors import InputError
from eyas.formats.config_problems import residual_default
from eyas.formats.problem import Problem
from eyas.formats.taps import IDS_KEY, ids_for
from eyas.formats.targets import VLLM_KNOWN
from eyas.wiring.loaders.case import Case


def taps_problems(case: Case) -> Iterator[Problem]:
    """The captured boundaries against the draft's own."""
    got, wanted = case.capture.boundaries or case.capture.unbounded, case.declared.boundaries
    if case.declared.ids_ambiguous:
        yield from (problem for problem in case.declared.problems if problem.code == "ids_ambiguous")
    if got is None or wanted is None or got == wanted:
        return
    code = "tap_embedding" if (0 in got) != (0 in wanted) else "tap_offset"
    code = "tap_missing" if len(got) < len(wanted) and set(got) <= set(wanted) else code
    newer = case.sglang and "id+1, always" in case.capture.rule
    yield Problem(
        code,
        where="layer ids",
        expected=f"boundaries {list(wanted)} ({case.declared.boundaries_source})",
        found=f"{list(got)} ({case.capture.rule})",
        fix=_ids_fix(case, wanted) + (", or serve with a newer release" if newer and case.eyas else ""),
    )


def _ids_fix(case: Case, wanted: tuple[int, ...]) -> str:
    """The line that makes this engine capture `wanted`."""
    if not case.sglang:
        return f"{IDS_KEY} = {list(wanted)}"
    layers = case.target.num_hidden_layers
    key = f"eagle_config.{IDS_KEY}"
    if layers is None:
        return f"write {key} in this engine's numbering (eyas export does)"
    try:
        return f"{key} = {ids_for(case.view.engine, wanted, case.target.model_type, layers)}"
    except InputError:
        return "no list makes this engine capture them: another engine, or train with other taps"


def width_problems(case: Case) -> Iterator[Problem]:
    """`fc` against the states that reach it."""
    count, got = case.view.get("num_aux_hidden_states"), case.capture.boundaries or case.capture.unbounded
    hidden, target = case.view.get("hidden_size"), case.view.get("target_hidden_size")
    if case.view.get("use_aux_hidden_state") is False or got is None:
        return
    if case.sglang and type(target) is int and len(got) * target == hidden:
        yield Problem(
            "fc_skipped",
            where="fc",
            expected="fc applied to the states",
            found=f"{len(got)} state of width {target}, as wide as the draft: SGLang skips fc in silence",
            fix="train with more taps, or serve with vLLM",
        )
    elif type(count) is int and len(got) != count:
        where = case.view.reads["num_aux_hidden_states"].where
        by_list = where.startswith("length of") and any(one.code == "tap_missing" for one in case.capture.problems)
        wanted = f"num_aux_hidden_states = {len(case.declared.boundaries or got)}"
        yield Problem(
            "shape_mismatch",
            where="num_aux_hidden_states",
            expected=f"fc for the {len(got)} states captured",
            found=f"{count} ({where})",
            fix="mend the layer ids: fc is built for as many as they are" if by_list else wanted,
        )


def target_problems(case: Case) -> Iterator[Problem]:
    """The widths and vocabulary of the target the draft is served with."""
    facts, view = case.target, case.view
    pairs = (
        ("shape_mismatch", "target_hidden_size", facts.hidden_size, view.get("target_hidden_size")),
        ("vocab_mismatch", "vocab_size", facts.vocab_size, view.get("vocab_size")),
    )
    for code, key, wanted, got in pairs:
        if wanted is not None and type(got) is int and wanted != got:
            yield Problem(code, where=key, expected=f"{wanted}, the target's", found=str(got), fix=f"{key} = {wanted}")
    block = case.eyas
    if block is not None and facts.num_hidden_layers not in (None, block.target_num_hidden_layers):
        expected = f"a target of {block.target_num_hidden_layers} layers"
        found, fix = f"one of {facts.num_hidden_layers}", "serve the draft with the target it was trained for"
        yield Problem("target_revision", where="target", expected=expected, found=found, fix=fix)
    if not case.sglang and facts.model_type is not None and facts.model_type not in VLLM_KNOWN:
        yield Problem(
            "architecture_unknown",
            where="target model_type",
            expected="a target class of vLLM that is known to capture states",
            found=facts.model_type,
            fix="look for SupportsEagle3 in its model file, or try it on a running vLLM",
            severity="info",
        )


# Options ----------------------------------------------------------------------------------------------------------

CODES = {
    "fc_norm": "fc_norm",
    "norm_before_fc": "fc_norm",
    "norm_output": "feedback_norm",
    "norm_before_residual": "residual_norm",
    "attention_bias": "bias_dropped",
    "fc_bias": "bias_dropped",
    "sliding_window": "sliding_window",
}


def declared_options(case: Case) -> dict[str, Any]:
    """What the draft is: by its eyas block, else by any key that says so, wherever a reader may look for it."""
    if case.eyas is not None:
        return {name: getattr(case.eyas, name) for name in CODES}
    raw = case.raw
    inner = raw.get("eagle_config")
    nested: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    original = case.declared
    window = raw.get("sliding_window")
    types = raw.get("layer_types")
    windowed = raw.get("use_sliding_window") is True or (isinstance(types, list) and "sliding_attention" in types)
    return {
        "fc_norm": bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
        "norm_before_fc": bool(nested.get("norm_before_fc") or raw.get("norm_before_fc")),
        "norm_output": bool(raw.get("norm_output")) and original.method == "eagle3",
        "norm_before_residual": bool(raw.get("norm_before_residual", residual_default(raw, original.format))),
        "attention_bias": bool(raw.get("attention_bias")),
        "fc_bias": bool(raw.get("bias")),
        "sliding_window": window if windowed else None,
    }


def options_problems(case: Case) -> Iterator[Problem]:
    for name, wanted in declared_options(case).items():
        read = case.view.reads[name]
        if (read.value or None) == (wanted or None):
            continue
        yield Problem(
            CODES[name],
            where=name,
            expected=repr(wanted),
            found=f"{read.value!r} ({read.where})",
            fix=_option_fix(case, name, wanted),
        )


def _option_fix(case: Case, name: str, wanted: Any) -> str:
    if name == "sliding_window" and case.view.block == "mla":
        return "train without a window: the MLA drafts of both engines attend to everything"
    if name == "sliding_window" and case.sglang:
        return f"--speculative-draft-window-size {wanted}"
    if name == "sliding_window":
        return f'layer_types = ["sliding_attention"], sliding_window = {wanted}'
    if case.view.reads[name].where.startswith("not read"):
        other = "vLLM" if case.sglang else "SGLang"
        return f"another release or {other}, or train without {name}"
    return f"{name} = {str(wanted).lower()}"
