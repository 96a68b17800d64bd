"""Problems: where what an engine reads, builds and captures is not what the draft is; and what it does, in words.

Sources beside those of `view` and `parameters`, as read: SGLang 0.5.23 configs/model_config.py (contexts), llama.py
`set_embed`, speculative/eagle_utils.py; vLLM 0.20 to 0.33 config/speculative.py (contexts, method by path name).
"""

import json
from collections.abc import Callable, Iterator

from eyas.formats.methods import METHODS
from eyas.formats.problem import Problem
from eyas.wiring.loaders.case import Case
from eyas.wiring.loaders.rope_rules import latent_problems, rope_problems
from eyas.wiring.loaders.view import View
from eyas.wiring.loaders.weight_rules import embedding_problems, keys_problems, tensors_problems
from eyas.wiring.loaders.wiring_rules import (
    options_problems,
    taps_problems,
    target_problems,
    width_problems,
)

CACHE_ONLY_ROPE = frozenset({"default", "linear", "llama3", "ntk", "proportional", "mrope"})
"""Rope types whose length only sizes a cache (vLLM 0.33 config/speculative.py, which reads mrope as default)."""


def judge(case: Case) -> tuple[list[Problem], dict[str, str]]:
    """Problems of one draft before one engine, and what the engine does, in words."""
    if case.view.get("hidden_size") is None and case.eyas is not None:
        return [_training_checkpoint(case)], {"start": "a training checkpoint: the engine's keys are not there"}
    if case.sglang and case.declared.format == "speculators":
        return [*_class(case), *_speculators(case)], {"start": "SGLang does not read the speculators format"}
    problems = [problem for rule in RULES for problem in rule(case)]
    if case.view.known:
        return problems, _words(case)
    start = {"start": f"does not start; under the nearest class, of a {case.view.block} block:"}
    return [*_class(case), *problems], start | _words(case)


def _speculators(case: Case) -> Iterator[Problem]:
    """What a speculators draft would need even under a class that SGLang has."""
    if case.raw.get("norm_before_residual", True) is True:
        said = "true" if "norm_before_residual" in case.raw else "true, when absent in the speculators format"
        fix = "serve with vLLM, or train without norm_before_residual"
        yield Problem("residual_norm", "norm_before_residual", "false, all that SGLang does", said, fix)


def _class(case: Case) -> Iterator[Problem]:
    engine, name = case.view.engine, case.view.class_name
    speculators = case.sglang and case.declared.format == "speculators"
    yield Problem(
        "architecture_unknown",
        where="architectures",
        expected=f"a draft class of {engine}",
        found=(name or "no name at all") + (": SGLang does not read the speculators format" if speculators else ""),
        fix="eyas export writes the name both engines know",
        severity="error",
    )


def _training_checkpoint(case: Case) -> Problem:
    return Problem(
        "config_key_missing",
        where="hidden_size and the other sizes",
        expected=f"the keys {case.view.engine.name} builds its draft from",
        found="an eyas block only: this is a training checkpoint",
        fix="eyas export --draft DRAFT --out EXPORT",
        severity="error",
    )


def context_problems(case: Case) -> Iterator[Problem]:
    """What a draft shorter than its target leads to, release by release."""
    target, read, engine = case.target.context_length, case.view.reads["max_position_embeddings"], case.view.engine
    length = draft_context(case.view)
    if target is None or length is None or length >= target:
        return
    cache_only = case.view.get("rope_scaling")["rope_type"] in CACHE_ONLY_ROPE
    severity, words = "error", "ValueError at start"
    if not case.sglang and engine.since("0.32"):
        raised = cache_only or not engine.since("0.33")
        severity = "info" if raised and cache_only else "warning"
        words = "raised to the target's" if raised else "max_model_len is lowered to it"
    elif not case.sglang:
        words = "positions beyond it end in a device assert"
    found = f"{length} ({read.where}): {words}"
    fix = f"max_position_embeddings = {target}"
    yield Problem("context_too_short", "max_position_embeddings", f"{target}, the target's", found, fix, severity)


def draft_context(view: View) -> int | None:
    """The draft's context as the engine derives it: SGLang multiplies by the rope's factor."""
    length, scaling = view.get("max_position_embeddings"), view.get("rope_scaling") or {}
    if type(length) is not int:
        return None
    factor = scaling.get("factor", 1)
    plain = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    scaled = view.engine.name == "sglang" and not plain and isinstance(factor, int | float)
    return int(length * factor) if scaled else length


def method_problems(case: Case) -> Iterator[Problem]:
    """A draft of a method that this engine does not have."""
    method = METHODS[case.declared.method]
    if case.sglang and method.sglang is None:
        found = "SGLang has no such method: as EAGLE3 it would feed this draft states that it was never trained on"
        fix = f"serve with vLLM, --speculative-config {json.dumps(dict(method.vllm))}"
        yield Problem("algorithm_mismatch", "method", method.words, found, fix, severity="error")


RULES: tuple[Callable[[Case], Iterator[Problem]], ...] = (
    method_problems,
    taps_problems,
    width_problems,
    target_problems,
    options_problems,
    rope_problems,
    latent_problems,
    keys_problems,
    embedding_problems,
    tensors_problems,
    context_problems,
)


def _words(case: Case) -> dict[str, str]:
    view, sglang = case.view, case.sglang
    window = view.reads["sliding_window"]
    rows, total = view.get("draft_vocab_size"), view.get("vocab_size")
    normed = "hidden_norm" if sglang else "input_layernorm"
    return {
        "embedding": _embedding_words(case),
        "head": _head_words(case),
        "vocabulary": f"{rows} of {total}" + (", by d2t" if rows != total and rows is not None else ""),
        "residual": "after hidden_norm" if view.get("norm_before_residual") else "before hidden_norm",
        "feedback": "after the last norm" if view.get("norm_output") else "before the last norm",
        "layers": f"{view.get('num_hidden_layers')}; after the first, {normed} norms the state",
        "rope": f"base {view.get('rope_theta')} ({view.reads['rope_theta'].where}), {view.get('rope_scaling')}",
        "window": f"{window.value}" if window.value else f"none ({window.where})",
        "context": f"{draft_context(view)} ({view.reads['max_position_embeddings'].where})",
        "algorithm": _algorithm_words(case),
    }


def _algorithm_words(case: Case) -> str:
    method = METHODS[case.declared.method]
    if case.sglang:
        return "none" if method.sglang is None else f"--speculative-algorithm {method.sglang}"
    keys = json.dumps(dict(method.vllm)).removesuffix("}")
    return f'--speculative-config {keys}, ...}}; unnamed, it is eagle3 only if the path contains "eagle3"'


def _embedding_words(case: Case) -> str:
    if not case.sglang:
        return "the draft's own where the file has one that differs, else the target's"
    same = case.view.get("target_hidden_size") == case.view.get("hidden_size")
    return "the target's, whatever the file holds" if same else "the draft's own: the widths differ"


def _head_words(case: Case) -> str:
    if case.sglang and case.view.get("tie_word_embeddings"):
        return "the embedding (tie_word_embeddings)"
    shared = case.sglang and case.view.get("draft_vocab_size") is None
    return "the target's (no draft_vocab_size)" if shared else "the draft's own"
