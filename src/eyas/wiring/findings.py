"""What can be wrong: the closed set of finding codes, each with its severity and one line of meaning.

`docs/findings.md` is `findings_page()`, held to it by a test. Outside programs rely on the codes: add, never rename.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, field_validator

from eyas.errors import EyasError, did_you_mean
from eyas.formats.problem import Problem

Severity = Literal["error", "warning", "info"]


class Code(NamedTuple):
    """A code's usual severity and its meaning."""

    severity: Severity
    meaning: str


CODES: dict[str, Code] = {
    # layers
    "tap_offset": Code("error", "A tap is another boundary than declared: shown by numbers, or by an engine's rule."),
    "tap_embedding": Code("error", "The embedding output stands where a layer's state was declared, or the reverse."),
    "tap_order": Code("error", "Taps are concatenated in another order than the draft was trained on."),
    "tap_missing": Code("error", "Fewer states are captured than the ids name."),
    "tap_post_norm": Code("error", "A tap was taken after the final norm; boundary n is before it."),
    "ids_ignored": Code("error", "Layer ids are in the config, but this engine does not read them where they are."),
    "ids_ambiguous": Code("warning", "Layer ids were read, but nothing says which numbering they are in."),
    # config
    "config_key_missing": Code("warning", "A key is absent, so an engine takes its own default in silence."),
    "config_key_wrong": Code("error", "A key's value is one an engine reads otherwise, or fails on."),
    "architecture_unknown": Code("warning", "No known engine class goes by this name, or its rule is not known."),
    "context_too_short": Code("error", "The draft's context length is below the target's."),
    "version_unsupported": Code("warning", "The engine's release is not one whose rules were read."),
    # rows
    "token_shift": Code("error", "Embedded tokens are shifted against the states they belong to."),
    "position_shift": Code("error", "Rotary positions are shifted against the rows."),
    "mask_empty": Code("error", "A sample has no supervised token."),
    "mask_shift": Code(
        "warning", "The loss mask is shifted: rows are trained that serving never meets, or the reverse."
    ),
    "capture_incomplete": Code("error", "Captures lack samples, rows or shards that their index names."),
    "data_corrupt": Code("error", "A file's bytes differ from the checksum it was written with, or cannot be read."),
    # norms
    "teacher_not_normed": Code("error", "The teacher's states lack the final norm before the head."),
    "teacher_double_normed": Code("error", "The teacher's states pass the final norm twice."),
    "teacher_scale": Code("error", "The teacher's logits lack the target's scale or soft-cap."),
    "residual_norm": Code(
        "error", "The residual is taken after the norm where training took it before, or the reverse."
    ),
    "feedback_norm": Code(
        "error", "The next step is fed h before the norm where training fed it after, or the reverse."
    ),
    "fc_norm": Code("error", "The norms before fc (one a tap, or one over all) are not those of training."),
    "fc_skipped": Code("error", "The engine does not apply fc: the state it is given is already as wide as the draft."),
    # rope
    "rope_theta": Code("error", "The rotary base is not the one of training."),
    "rope_scaling": Code("error", "The rotary scaling is not the one of training."),
    # vocabulary, embedding, head
    "d2t_missing": Code(
        "error", "The draft vocabulary is reduced and its table is absent: draft ids pass for target ids."
    ),
    "d2t_absolute": Code("error", "d2t holds target ids; engines add it to the draft id."),
    "d2t_out_of_range": Code("error", "d2t points outside the target's vocabulary, or disagrees with t2d."),
    "vocab_mismatch": Code("error", "Vocabulary sizes, or the tokens they must hold, do not fit the target."),
    "embed_mismatch": Code("error", "The draft's embedding is not the one it will be served with."),
    "head_mismatch": Code("error", "The head is not the one the draft or teacher was trained with."),
    "tied_head": Code("error", "tie_word_embeddings puts the embedding in the place of the draft's own head."),
    # tensors
    "bias_dropped": Code("error", "An engine drops this bias in silence."),
    "sliding_window": Code("error", "The draft's attention window is not honoured, or not the one of training."),
    "tensor_missing": Code("error", "A tensor the config calls for is absent; engines leave it random without a word."),
    "tensor_unexpected": Code("error", "A tensor nobody reads: dropped in silence, or refused at start."),
    "shape_mismatch": Code("error", "A tensor's shape is not the one the config calls for."),
    "dtype_mismatch": Code(
        "error", "A tensor's dtype is wrong (d2t is int64, t2d bool), or differs from the config's."
    ),
    "tensor_not_finite": Code("error", "A tensor holds NaN or infinity: nothing is accepted, and no engine says so."),
    "quantization_mismatch": Code("error", "States were captured under another quantisation than will be served."),
    "quantization_inherited": Code("warning", "The draft would be read with the target's quantisation."),
    # whose
    "target_revision": Code("error", "Made with another target, or another revision of its weights."),
    "tokenizer_mismatch": Code("error", "Made with another tokenizer."),
    "template_mismatch": Code("warning", "Made with another chat template, system prompt or date."),
    "algorithm_mismatch": Code("error", "The engine's speculative algorithm is not the draft's."),
    "ttt_mismatch": Code("warning", "The served chain is longer than the steps the draft was trained for."),
    "parity_mismatch": Code("error", "Two ways to compute the same rows differ."),
    # machine
    "flag_conflict": Code(
        "error", "Engine flags exclude each other, one overrides another, or the engine does not have it."
    ),
    "memory_short": Code("error", "The memory will not do."),
    "port_busy": Code("error", "The port is taken."),
    "gpu_busy": Code("error", "A GPU is held by another process."),
    "disk_short": Code("error", "The disk will not do."),
}


class Finding(BaseModel):
    """One thing that is wrong: what was expected, what was found, where, and the fix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    severity: Severity
    where: str
    expected: str
    found: str
    fix: str
    message: str

    @field_validator("code")
    @classmethod
    def _known(cls, code: str) -> str:
        assert code in CODES, f"unknown finding code {code!r}{did_you_mean(code, CODES)}"
        return code


def finding(problem: Problem, where: str = "") -> Finding:
    """A format's problem with its code's severity and meaning; `where` (a file) goes before the problem's own place."""
    code = CODES[problem.code]
    severities: dict[str | None, Severity] = {"error": "error", "warning": "warning", "info": "info"}
    return Finding(
        code=problem.code,
        severity=severities.get(problem.severity, code.severity),
        where=f"{where}: {problem.where}" if where else problem.where,
        expected=problem.expected,
        found=problem.found,
        fix=problem.fix,
        message=code.meaning,
    )


def findings(problems: Iterable[Problem], where: str = "") -> list[Finding]:
    """`finding` of each, repeated ones once."""
    return [finding(problem, where) for problem in dict.fromkeys(problems)]


def refused(error: EyasError, message: str | None = None) -> Finding:
    """An error that has a code, as the finding it is."""
    assert error.code is not None, "only errors with a code are findings"
    return Finding(
        code=error.code,
        severity="error",
        where=error.where,
        expected=error.wanted,
        found=error.got.removesuffix(f" ({error.code})"),
        fix=error.next,
        message=message or CODES[error.code].meaning,
    )


def findings_page() -> str:
    """The text of docs/findings.md."""
    rows = [f"| `{name}` | {code.severity} | {code.meaning} |" for name, code in CODES.items()]
    head = [
        "# Findings",
        "",
        "What `eyas check` and `eyas inspect` can find. Each finding has `code`, `severity`, `where`, `expected`,",
        "`found`, `fix` and `message`. Codes are stable; the severity is the usual one, and a case may be milder.",
        "",
        "| code | severity | meaning |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])
