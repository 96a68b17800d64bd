"""Flags that exclude or override each other, and settings that cost acceptance without a word. No torch.

Sources, as read: SGLang 0.5.11 server_args.py, 0.5.23 arg_groups/{speculative,validation,serving}_hook.py; vLLM 0.33
config/speculative.py; bug reports of Kimi-K2.6 (SGLang 23490), of EAGLE for EAGLE3 (21272), of no draft path (36528).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.formats.draft_config import DraftConfig
from eyas.formats.methods import METHODS, method_of
from eyas.formats.problem import Problem
from eyas.formats.targets import MLA
from eyas.launch.arguments import Launch
from eyas.launch.passed import unknown_flags
from eyas.wiring.loaders import TargetFacts

CAP = 48
"""SGLang's max_running_requests under speculation, where none is given."""
FILLED_IN = frozenset({"deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "bailing_moe"})
"""Targets for which SGLang takes the target's own folder where no draft is named (their built-in MTP layer)."""
OVER_PP = frozenset({"llama", "mistral", "qwen2", "sarvam_mla", "sarvam_moe"})
"""vLLM target classes that pass states from one pipeline stage to the next (V2 runner, from 0.32)."""


@dataclass(frozen=True)
class Setting:
    """A launch and what is known of its two models. `draft_raw` is the draft's config.json, {} where there is none."""

    launch: Launch
    target: TargetFacts
    target_raw: Mapping[str, Any]
    draft_raw: Mapping[str, Any]
    draft_block: str | None
    """`llama`, `qwen3` or `mla`; None without a draft."""
    eyas: DraftConfig | None
    ttt_length: int | None
    baseline: Launch | None = None


def conflicts(setting: Setting) -> list[Problem]:
    """Every conflict by name."""
    return [problem for rule in RULES for problem in rule(setting)]


def _problem(code: str, where: str, expected: str, found: str, fix: str, severity: str | None = None) -> Problem:
    return Problem(code, where=where, expected=expected, found=found, fix=fix, severity=severity)


def _algorithm(setting: Setting) -> Iterator[Problem]:
    """An EAGLE-3 folder needs EAGLE-3's algorithm, by name."""
    launch = setting.launch
    if not setting.draft_raw or launch.draft is None:
        return
    wanted, flag = ("EAGLE3", "--speculative-algorithm EAGLE3") if launch.sglang else ("eagle3", '"method": "eagle3"')
    named = launch.algorithm
    if (
        named is None
        and not launch.sglang
        and "eagle3" in launch.draft.lower()
        and "eagle-" not in launch.draft.lower()
    ):
        return
    if named is not None and named.upper() == "EAGLE3":
        return
    words = {
        True: f"{named}: no states are captured, fc is skipped, accept length 1.0"
        if named
        else "none: the draft is not used",
        False: f"{named}" if named else "none: it is guessed from the path, which does not say eagle3",
    }[launch.sglang]
    yield _problem("algorithm_mismatch", "speculative algorithm", f"{wanted}, for an EAGLE-3 draft", words, flag)


def _parallel(setting: Setting) -> Iterator[Problem]:
    """P-EAGLE is EAGLE-3's class with one key more; SGLang has nothing like it, which the loader's report says."""
    launch = setting.launch
    if not setting.draft_raw or launch.sglang or launch.draft is None:
        return
    method = METHODS[method_of(setting.draft_raw)]
    wanted = bool(method.vllm.get("parallel_drafting"))
    if launch.parallel_drafting != wanted:
        found = "not set: the draft would be fed its own states, which it never saw" if wanted else "true: vLLM stops"
        value = str(wanted).lower()
        expected, fix = f"{value}, for a {method.words} draft", f'"parallel_drafting": {value} in --speculative-config'
        yield _problem("algorithm_mismatch", "parallel_drafting", expected, found, fix)


def _draft_path(setting: Setting) -> Iterator[Problem]:
    launch = setting.launch
    wants = launch.speculative or bool(_ids(setting.target_raw))
    if launch.draft is not None or not wants or (launch.algorithm or "").upper() in ("NGRAM", "NEXTN"):
        return
    own = launch.sglang and setting.target.model_type in FILLED_IN
    found = "none: the target's own folder is taken for the draft" if own else "none: the target is loaded as the draft"
    flag = "--speculative-draft-model-path DRAFT" if launch.sglang else '"model": "DRAFT" in --speculative-config'
    yield _problem("flag_conflict", "draft path", "the draft's folder", found, flag)


def _ids(raw: Mapping[str, Any]) -> Any:
    """Layer ids in a config.json, wherever they stand."""
    nested = raw.get("eagle_config")
    inner = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, Mapping) else None
    return raw.get("eagle_aux_hidden_state_layer_ids") or inner


def _backend(setting: Setting) -> Iterator[Problem]:
    """An MLA target's attention backend cannot run a GQA draft."""
    launch, kind = setting.launch, setting.target.model_type
    if not launch.sglang or kind not in MLA or setting.draft_block in (None, "mla"):
        return
    if launch.draft_attention_backend is None:
        yield _problem(
            "flag_conflict",
            "--speculative-draft-attention-backend",
            "a backend for grouped-query attention",
            f"none: the draft inherits the one of the {kind} target, which is for latent attention",
            "--speculative-draft-attention-backend fa3 (flashinfer or trtllm_mha where that runs)",
        )


def _quantization(setting: Setting) -> Iterator[Problem]:
    """SGLang gives the draft the target's --quantization unless told otherwise."""
    launch = setting.launch
    if not launch.sglang or launch.draft is None or launch.draft_quantization is not None:
        return
    if launch.quantization in (None, "unquant") or setting.draft_raw.get("quantization_config"):
        return
    if launch.quantization == "modelopt_fp4" and setting.draft_block == "mla":
        return
    dtype = setting.draft_raw.get("torch_dtype", setting.draft_raw.get("dtype", "unquantised"))
    yield _problem(
        "quantization_inherited",
        "--speculative-draft-model-quantization",
        f"unquant, for a {dtype} draft",
        f"none: {launch.quantization}, the target's, is taken for the draft too",
        "--speculative-draft-model-quantization unquant",
    )


def _cap(setting: Setting) -> Iterator[Problem]:
    """A cap on running requests on one side only makes a comparison unfair."""
    launch, baseline = setting.launch, setting.baseline
    if baseline is not None:
        ours, theirs = _cap_of(launch), _cap_of(baseline)
        if ours != theirs:
            flag = "--max-running-requests" if launch.sglang else "--max-num-seqs"
            found, fix = f"{ours or 'no cap'} against {theirs or 'no cap'}", f"{flag} {ours or theirs} on both"
            yield _problem("flag_conflict", flag, "one cap on both sides", found, fix, "warning")
    elif launch.sglang and launch.speculative and launch.max_running_requests is None:
        found = f"none: {CAP} under speculation, and no cap on a plain server"
        fix = f"--max-running-requests {CAP}, on the baseline too"
        yield _problem("flag_conflict", "--max-running-requests", "one cap on both sides", found, fix, "warning")


def _cap_of(launch: Launch) -> int | None:
    default = CAP if launch.sglang and launch.speculative else None
    return launch.max_running_requests if launch.max_running_requests is not None else default


def _tree(setting: Setting) -> Iterator[Problem]:
    """num_steps, topk and num_draft_tokens among each other and with the page size."""
    launch = setting.launch
    if not launch.sglang:
        return
    steps, topk, tokens = launch.num_steps, launch.topk, launch.num_draft_tokens
    where = "--speculative-num-steps, -eagle-topk, -num-draft-tokens"
    given = [value is not None for value in (steps, topk, tokens)]
    if any(given) and not all(given):
        found = f"num_steps {steps}, topk {topk}, num_draft_tokens {tokens}: the server stops on the missing one"
        fix = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        yield _problem("flag_conflict", where, "all three, or none", found, fix)
    elif topk == 1 and steps is not None and tokens != steps + 1:
        found = f"{tokens} beside num_steps {steps}: overridden with {steps + 1}"
        fix = f"--speculative-num-draft-tokens {steps + 1}"
        expected = "num_steps + 1, as topk is 1"
        yield _problem("flag_conflict", "--speculative-num-draft-tokens", expected, found, fix, "warning")
    elif topk is not None and topk > 1:
        yield from _pages(launch, topk)


def _pages(launch: Launch, topk: int) -> Iterator[Problem]:
    backend = launch.attention_backend
    able = ("flashinfer", "fa3", "triton") if launch.engine.since("0.5.13") else ("flashinfer", "fa3")
    chain_only = "trtllm_mha" in (backend, launch.prefill_attention_backend)
    if chain_only:
        found = f"topk {topk} on trtllm_mha, which verifies chains only"
        yield _problem("flag_conflict", "--speculative-eagle-topk", "1", found, "--speculative-eagle-topk 1")
    elif launch.page_size is not None and launch.page_size > 1 and backend not in able:
        shown = backend or "the default backend"
        found = f"topk {topk}, page size {launch.page_size}, {shown}"
        expected = f"page size 1, or one of {', '.join(able)}"
        fix = f"--page-size 1, or --attention-backend {able[0]}"
        severity = "error" if backend is not None else "warning"
        yield _problem("flag_conflict", "--page-size", expected, found, fix, severity)


def _pipeline(setting: Setting) -> Iterator[Problem]:
    """States of earlier pipeline stages do not reach the draft."""
    launch = setting.launch
    if launch.pp <= 1 or not launch.speculative:
        return
    if not launch.sglang and launch.engine.since("0.32") and setting.target.model_type in OVER_PP:
        return
    flag = "--pp-size 1" if launch.sglang else "--pipeline-parallel-size 1"
    found = f"{launch.pp}: the server stops" if launch.sglang else f"{launch.pp}: this target cannot pass states on"
    yield _problem("flag_conflict", flag.split()[0], "1 with EAGLE-3", found, flag)


def _draft_tp(setting: Setting) -> Iterator[Problem]:
    launch = setting.launch
    if launch.draft_tp is not None and launch.draft_tp not in (1, launch.tp):
        found = f"{launch.draft_tp} beside the target's {launch.tp}"
        fix = '"draft_tensor_parallel_size": 1'
        yield _problem("flag_conflict", "draft_tensor_parallel_size", "1 or the target's", found, fix)


def _window(setting: Setting) -> Iterator[Problem]:
    """The server's window against the one of training; SGLang's MLA draft does not look at it."""
    launch, eyas = setting.launch, setting.eyas
    if eyas is None or setting.draft_block == "mla" or launch.draft_window == eyas.sliding_window or not launch.sglang:
        return
    wanted = eyas.sliding_window
    fix = f"--speculative-draft-window-size {wanted}" if wanted else "leave --speculative-draft-window-size out"
    found = str(launch.draft_window or "full attention")
    expected = f"{wanted or 'full attention'}, as trained"
    yield _problem("sliding_window", "--speculative-draft-window-size", expected, found, fix)


def _chain(setting: Setting) -> Iterator[Problem]:
    yield from chain_problems(setting.launch.num_steps, setting.ttt_length)


def chain_problems(steps: int | None, trained: int | None) -> Iterator[Problem]:
    """A chain longer than training unrolled."""
    if steps is not None and trained is not None and steps > trained:
        found, fix = f"{steps} steps", f"num_steps {trained}, or measure whether more helps (eyas bench)"
        yield _problem("ttt_mismatch", "num_steps", f"at most {trained}, as trained", found, fix)


def _unknown(setting: Setting) -> Iterator[Problem]:
    """Flags that the newest release read does not have: another release may, so it is a doubt."""
    for note in unknown_flags(setting.launch.engine.name, setting.launch.flags):
        flag, _, found = note.partition(" ")
        fix = f"leave {flag} out, or mend it"
        yield _problem("flag_conflict", flag, "flags that the engine's parser knows", found, fix, "warning")


RULES: tuple[Callable[[Setting], Iterator[Problem]], ...] = (
    _unknown,
    _algorithm,
    _parallel,
    _draft_path,
    _backend,
    _quantization,
    _cap,
    _tree,
    _pipeline,
    _draft_tp,
    _window,
    _chain,
)
