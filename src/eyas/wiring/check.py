"""`eyas check`: every check that what was given allows, what each one saw, and what could not be checked and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.data.shards import CaptureReader, Sample
from eyas.errors import InputError
from eyas.formats.headers import read_headers
from eyas.formats.target_config import read_json
from eyas.models.checkpoint import load_draft, newest_step
from eyas.models.draft import Draft
from eyas.models.foreign import NamedTarget
from eyas.models.target import Target
from eyas.models.vocab import check_vocab
from eyas.run import read_manifest
from eyas.wiring.findings import Finding
from eyas.wiring.hypotheses.run import NAME as HYPOTHESES
from eyas.wiring.hypotheses.run import check_hypotheses
from eyas.wiring.identify import identify_taps
from eyas.wiring.loaders import TargetFacts
from eyas.wiring.parity import ttt_equals_incremental
from eyas.wiring.reference import final_normed, num_hidden_layers, open_reference, reference_boundaries
from eyas.wiring.served import ALLOWED, walk_against_engine
from eyas.wiring.static_checks import Check, check_loader, check_tables
from eyas.wiring.tap_findings import shift_finding, tap_findings
from eyas.wiring.teacher import NEAR, agreeing_shift, norm_state, teacher_divergence
from eyas.wiring.trace_draft import trace_checks

PROBE_SAMPLES, PROBE_MIN, PROBE_MAX = 2, 24, 256
PARITY_TOLERANCE = 1e-4
"""Float32 sums in another order, relative to the logits' own scale."""
SERVED_STEPS, SERVED_SAMPLES = 3, 6
"""Chain length and answers of the engine's own run: a minute on two cores with the default target."""
ESSENTIAL = ("tap identity", "teacher", "TTT parity", "vocabulary")


@dataclass(frozen=True)
class Given:
    """What the person gave; each check takes what it needs."""

    target: Target | None
    """None where it is not given, or larger than memory."""
    reference: Target | Path | None
    """The target, or the folder to stream it from."""
    captures: CaptureReader | None
    draft_folder: Path | None
    export_folder: Path | None


def check(
    target_name: str | None,
    captures: Path | None = None,
    draft: Path | None = None,
    export: Path | None = None,
    trust_remote_code: bool = False,
    engines: Sequence[str] = (),
    traces: Sequence[Path] = (),
) -> dict[str, Any]:
    """Run every check possible. Returns `verdict`, `checks` and `findings` (design: docs/commands.md).

    `engines` (`sglang@0.5.23`, ...): what each would do with the export, or with the draft where there is none.
    `traces`: what a running engine captured and fed its draft, or states dumped by other programs (docs/trace.md).
    """
    if not any((captures, draft, export, traces)):
        raise InputError(
            wanted="something to check",
            got="neither captures, draft, export nor trace",
            where="eyas check",
            next="eyas check --captures RUN/captures --draft RUN/export",
        )
    for flag, path in (("--draft", draft), ("--export", export)):
        if path is not None:
            require_draft(flag, path, weights=not traces)
    reader = None if captures is None else CaptureReader(captures)
    if target_name is None and captures is not None:
        target_name = read_manifest(captures, "captures").settings.get("target", {}).get("name")
    reference = None if target_name is None else open_reference(target_name, trust_remote_code=trust_remote_code)
    target = reference if isinstance(reference, Target) else None
    given = Given(target, reference, reader, draft, export)
    checks = [attempt(name, one, given) for name, one in CHECKS.items()]
    served = export or draft
    if served is not None:
        facts = None if target is None else TargetFacts.of_identity(target.identity, target.context_length)
        checks += [check_loader(served, engine, facts) for engine in engines]
    if traces:
        checks += trace_checks(traces, reference, reader, draft_or_none(given), draft or export)
    findings = [finding for one in checks for finding in one.findings]
    return {
        "verdict": verdict(checks, findings),
        "checks": [one.as_dict for one in checks],
        "findings": [finding.model_dump() for finding in findings],
    }


def require_draft(flag: str, path: Path, *, weights: bool) -> None:
    """Raise InputError unless `path` is a draft's config.json or its folder, readable, the weights whole if wanted."""
    if path.is_file():
        read_json(path)
        return
    if not path.is_dir():
        raise InputError(
            wanted=f"a draft's folder for {flag}",
            got="no such folder",
            where=str(path),
            next="eyas check --captures RUN/captures --draft RUN/draft --export RUN/export",
        )
    folder = newest_step(path)
    read_json(folder / "config.json")
    if weights:
        read_headers(folder)


def attempt(name: str, one: Callable[[Given], Check], given: Given) -> Check:
    """Run a check; one whose input is refused has failed, and says why, and the others still run."""
    try:
        return one(given)
    except InputError as error:
        return Check(name, "fail", str(error))


def verdict(checks: list[Check], findings: list[Finding]) -> str:
    """fail with any error; unknown if an essential check could not run; else pass."""
    if any(finding.severity == "error" for finding in findings) or any(one.status == "fail" for one in checks):
        return "fail"
    ran = {one.name for one in checks if one.status == "pass"}
    return "pass" if all(name in ran for name in ESSENTIAL) else "unknown"


def probe_samples(reader: CaptureReader) -> list[Sample]:
    """A few captured samples long enough to tell boundaries apart, cut to the probe's length."""
    long = [i for i, sample in enumerate(reader.samples) if sample.length >= PROBE_MIN]
    return [reader.read(i).cut(PROBE_MAX) for i in long[:PROBE_SAMPLES]]


def check_taps(given: Given) -> Check:
    """Each captured block is the boundary the manifest says, by numbers."""
    name = "tap identity"
    if given.reference is None or given.captures is None:
        return Check(name, "skipped", "needs captures and their target")
    samples = probe_samples(given.captures)
    if not samples:
        return Check(name, "skipped", f"no captured sample of {PROBE_MIN} tokens or more")
    declared = given.captures.boundaries
    n, up_to = num_hidden_layers(given.reference), None
    if isinstance(given.reference, Path):  # streamed: once, and no further than it must
        samples, up_to = samples[:1], max(declared)
    result = Check(name, "pass", "")
    lines: list[str] = []
    for sample in samples:
        reference = reference_boundaries(given.reference, sample.ids_T.tolist(), up_to)
        normed = final_normed(given.reference, reference[-1]) if len(reference) > n else None
        matches = identify_taps(sample.taps_TA, reference, normed)
        lines += [f"declared {boundary}: {match.words()}" for boundary, match in zip(declared, matches, strict=True)]
        seen = {(finding.code, finding.expected, finding.found) for finding in result.findings}
        found = tap_findings(matches, declared, n)
        result.findings += [one for one in found if (one.code, one.expected, one.found) not in seen]
        if not all(match.known for match in matches):
            result.status = "unknown"
    if result.findings:
        result.status = "fail"
    result.evidence = "; ".join(lines)
    return result


def check_teacher(given: Given) -> Check:
    """The stored last hidden gives the target's own next tokens under its declared norm state."""
    name = "teacher"
    if given.target is None or given.captures is None:
        return Check(name, "skipped", "needs captures and their target")
    samples = probe_samples(given.captures)
    if not samples:
        return Check(name, "skipped", f"no captured sample of {PROBE_MIN} tokens or more")
    totals = {"before": 0.0, "after": 0.0, "normed twice": 0.0}
    references = [reference_boundaries(given.target, sample.ids_T.tolist())[-1] for sample in samples]
    for sample, last in zip(samples, references, strict=True):
        for reading, nats in teacher_divergence(given.target, sample.last_hidden_TH, last).items():
            totals[reading] += nats / len(samples)
    declared = given.captures.last_hidden_norm
    shown = norm_state(totals, declared)
    readings = ", ".join(f"{reading} {nats:.3f}" for reading, nats in totals.items())
    evidence = f"declared {declared} the final norm; nats a token from the target's own, read as {readings}"
    if shown == declared:
        return Check(name, "pass", evidence)
    shifts = {
        agreeing_shift(given.target, sample.last_hidden_TH, last, declared)
        for sample, last in zip(samples, references, strict=True)
    }
    if len(shifts) == 1 and (shift := shifts.pop()) is not None:
        return Check(name, "fail", evidence, [shift_finding((), shift, (), "captures: last_hidden")])
    finding = Finding(
        code="teacher_not_normed" if declared == "after" else "teacher_double_normed",
        severity="error",
        where="captures: last_hidden",
        expected=f"states from {declared} the final norm: {NEAR} nats or less from the target's own",
        found=f"{totals[declared]:.2f} nats" + (f"; read as {shown} it: {totals[shown]:.3f}" if shown else ""),
        fix=f"record last_hidden_norm = {shown}" if shown else "capture again from the same target",
        message="Trained on this teacher, the loss converges as usual and acceptance falls.",
    )
    return Check(name, "fail", evidence, [finding])


def load_checked_draft(given: Given) -> Draft | None:
    if given.draft_folder is None or given.target is None:
        return None
    target, captured = given.target, None if given.captures is None else given.captures.boundaries
    foreign = NamedTarget(target.identity, target.context_length, target.embedding)
    return load_draft(given.draft_folder, target.embedding, foreign=foreign, boundaries=captured)[0]


def draft_or_none(given: Given) -> Draft | None:
    """The draft; None where it cannot be loaded, which the vocabulary check reports."""
    try:
        return load_checked_draft(given)
    except InputError:
        return None


def check_parity(given: Given) -> Check:
    """The TTT training forward equals incremental decoding with a cache, on captured rows."""
    name = "TTT parity"
    draft = load_checked_draft(given)
    if draft is None or given.captures is None:
        return Check(name, "skipped", "needs a draft, captures and the target")
    samples = probe_samples(given.captures)
    if not samples:
        return Check(name, "skipped", f"no captured sample of {PROBE_MIN} tokens or more")
    difference = max(ttt_equals_incremental(draft, sample.taps_TA.float(), sample.ids_T) for sample in samples)
    evidence = f"largest relative difference of logits {difference:.1e} (allowed {PARITY_TOLERANCE:.0e})"
    if difference <= PARITY_TOLERANCE:
        return Check(name, "pass", evidence)
    finding = Finding(
        code="parity_mismatch",
        severity="error",
        where="draft",
        expected=f"training and cached decoding equal within {PARITY_TOLERANCE:.0e}",
        found=f"{difference:.1e}",
        fix="report this with the draft's config.json: one of the two attention paths is wrong",
        message="What was trained is not what will be served.",
    )
    return Check(name, "fail", evidence, [finding])


def check_vocabulary(given: Given) -> Check:
    """d2t and t2d describe one injective, sorted map into the target's vocabulary that keeps the stop tokens."""
    name = "vocabulary"
    if given.draft_folder is not None:
        tables = check_tables(newest_step(given.draft_folder))
        if tables.status == "fail":
            return tables
    draft = load_checked_draft(given)
    if draft is None or given.target is None:
        return Check(name, "skipped", "needs a draft and its target")
    if not draft.config.reduced_vocabulary:
        return Check(name, "pass", "the draft has the target's whole vocabulary")
    try:
        check_vocab(draft.d2t, draft.t2d)
    except InputError as error:
        finding = Finding(
            code="d2t_out_of_range",
            severity="error",
            where=error.where,
            expected=error.wanted,
            found=error.got,
            fix=error.next,
            message="Drafted ids map to the wrong tokens: text stays right, acceptance is near zero.",
        )
        return Check(name, "fail", str(error), [finding])
    lost = [stop for stop in given.target.stop_ids if not draft.t2d[stop]]
    evidence = f"{draft.config.draft_vocab_size} of {draft.config.vocab_size} tokens; stop ids {given.target.stop_ids}"
    if not lost:
        return Check(name, "pass", evidence)
    finding = Finding(
        code="vocab_mismatch",
        severity="warning",
        where="draft: t2d",
        expected=f"stop ids {lost} in the draft vocabulary",
        found="left out",
        fix="train again: the vocabulary always keeps the stop ids",
        message="The end of an answer can never be drafted.",
    )
    return Check(name, "pass", evidence, [finding])


def check_export(given: Given) -> Check:
    """The exported folder loads back to the draft's own wiring and tensors, bit for bit."""
    name = "export"
    draft = load_checked_draft(given)
    if draft is None or given.export_folder is None or given.target is None:
        return Check(name, "skipped", "needs a draft, its export and the target")
    exported = load_draft(given.export_folder, target_embedding=given.target.embedding)[0]
    ours, theirs = draft.state_dict(), exported.state_dict()
    differing = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    if not differing and draft.config == exported.config:
        return Check(name, "pass", f"{len(ours)} tensors equal, config equal")
    finding = Finding(
        code="parity_mismatch",
        severity="error",
        where=str(given.export_folder),
        expected="the draft's own tensors and wiring",
        found=f"{len(differing)} tensors differ: {', '.join(differing[:4])}",
        fix="eyas export again from this draft",
        message="What would be served is not the draft that was checked.",
    )
    return Check(name, "fail", f"{len(differing)} of {len(ours)} tensors differ", [finding])


def check_served(given: Given) -> Check:
    """The engine accepts, on captured prompts, what the evaluator's walk says it will."""
    name = "acceptance"
    draft = load_checked_draft(given)
    if draft is None or given.captures is None or given.target is None:
        return Check(name, "skipped", "needs a draft, greedy captures and the target")
    if not given.captures.greedy:
        return Check(name, "skipped", "the walk needs greedy answers; these were sampled")
    served = walk_against_engine(given.target, draft, given.captures, num_steps=SERVED_STEPS, limit=SERVED_SAMPLES)
    if served is None:
        return Check(name, "skipped", "no held-out answer with a round to count")
    evidence = (
        f"accept length {served.engine:.3f} in the engine, {served.walk:.3f} by the walk, over {served.samples} "
        f"held-out answers at chains of {served.num_steps}; {served.texts_equal} of them repeated token for token"
    )
    if served.difference <= ALLOWED:
        return Check(name, "pass", evidence, facts=served.as_dict)
    finding = Finding(
        code="parity_mismatch",
        severity="error",
        where="the embedded engine",
        expected=f"accept length {served.walk:.3f} within {ALLOWED:.0%}",
        found=f"{served.engine:.3f}",
        fix="capture again from this target; if it stays, report it with the draft's config.json",
        message="The engine feeds its draft something else than it was trained on.",
    )
    return Check(name, "fail", evidence, [finding], served.as_dict)


def check_wirings(given: Given) -> Check:
    """The draft reads the captured rows best under the wiring it declares."""
    if given.target is None or given.captures is None or given.draft_folder is None:
        return Check(HYPOTHESES, "skipped", "needs a draft, captures and the target")
    return check_hypotheses(given.target, given.draft_folder, given.captures)


CHECKS: dict[str, Callable[[Given], Check]] = {
    "tap identity": check_taps,
    "teacher": check_teacher,
    "TTT parity": check_parity,
    "vocabulary": check_vocabulary,
    HYPOTHESES: check_wirings,
    "export": check_export,
    "acceptance": check_served,
}
