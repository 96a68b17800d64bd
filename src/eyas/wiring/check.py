"""`eyas check`: every check that what was given allows, what each one saw, and what could not be checked and why."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from eyas.data.shards import CaptureReader, DamagedCaptures
from eyas.errors import InputError, Unsupported
from eyas.formats.headers import read_headers
from eyas.formats.target_config import read_json
from eyas.models.target import Target
from eyas.run import read_manifest
from eyas.stage import chosen_step
from eyas.wiring.capture_checks import check_data, check_taps, check_teacher
from eyas.wiring.draft_checks import (
    check_export,
    check_numbers,
    check_parity,
    check_served,
    check_vocabulary,
    check_wirings,
)
from eyas.wiring.findings import Finding, refused
from eyas.wiring.given import Given
from eyas.wiring.heatmap import check_ending, write_heatmap
from eyas.wiring.hypotheses.run import NAME as HYPOTHESES
from eyas.wiring.loaders import TargetFacts, read_target
from eyas.wiring.origin import check_origin
from eyas.wiring.reference import checked_device, open_reference
from eyas.wiring.static_checks import Check, check_loader, require_paths
from eyas.wiring.trace_draft import trace_checks

ESSENTIAL = ("tap identity", "teacher", "TTT parity", "vocabulary")
CHECKS: dict[str, Callable[[Given], Check]] = {
    "captures": check_data,
    "origin": check_origin,
    "tap identity": check_taps,
    "teacher": check_teacher,
    "TTT parity": check_parity,
    "vocabulary": check_vocabulary,
    "values": check_numbers,
    HYPOTHESES: check_wirings,
    "export": check_export,
    "acceptance": check_served,
}


def check(
    target_name: str | None,
    captures: Path | None = None,
    draft: Path | None = None,
    export: Path | None = None,
    trust_remote_code: bool = False,
    engines: Sequence[str] = (),
    traces: Sequence[Path] = (),
    heatmap: Path | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Run every check possible. Returns `verdict`, `checks` and `findings` (design: docs/commands.md).

    An export without its draft is checked as the draft. `engines` (`sglang@0.5.23`, ...): what each would do with the
    export, or with the draft where there is none. `traces`: what a running engine captured and fed its draft, or states
    dumped by other programs (docs/trace.md). `heatmap`: where to draw each block's score at every boundary (SVG).
    `device`: where a target larger than memory is streamed through (`cpu`, `cuda`, `cuda:1`).
    """
    require_paths(captures, draft, export, *traces)
    if heatmap is not None:
        check_ending(heatmap)
    for flag, path in (("--draft", draft), ("--export", export)):
        if path is not None:
            require_draft(flag, path, weights=not traces)
    reader, damage = open_captures(captures)
    if target_name is None and captures is not None:
        target_name = read_manifest(captures, "captures").settings.get("target", {}).get("name")
    reference = None if target_name is None else open_reference(target_name, trust_remote_code=trust_remote_code)
    target = reference if isinstance(reference, Target) else None
    weights = [path if path is not None and path.is_dir() else None for path in (draft or export, export)]
    given = Given(target, reference, reader, weights[0], weights[1] if draft else None, checked_device(device))
    checks = damage + [attempt(name, one, given) for name, one in CHECKS.items() if not (damage and name == "captures")]
    served = export or draft
    if served is not None:
        facts = facts_of(reference)
        checks += [check_loader(served, engine, facts) for engine in engines]
    if traces:
        checks += trace_checks(traces, reference, reader, given.draft_or_none(), draft or export, device)
    if heatmap is not None:
        write_heatmap(heatmap, checks)
    findings = each_once(finding for one in checks for finding in one.findings)
    named = {one.code for one in findings}
    findings += each_once(one.refusal for one in checks if one.refusal and one.refusal.code not in named)
    return {
        "verdict": verdict(checks, findings),
        "checks": [one.as_dict for one in checks],
        "findings": [finding.model_dump() for finding in findings],
    }


def each_once(findings: Iterable[Finding]) -> list[Finding]:
    """The captures' taps are named by their own check and by the draft's."""
    unique: dict[tuple[str, str, str], Finding] = {}
    for one in findings:
        unique.setdefault((one.code, one.where, one.expected), one)
    return list(unique.values())


def facts_of(reference: Target | Path | None) -> TargetFacts | None:
    if isinstance(reference, Target):
        return TargetFacts.of_identity(reference.identity, reference.context_length)
    return None if reference is None else read_target(reference)


def open_captures(folder: Path | None) -> tuple[CaptureReader | None, list[Check]]:
    """The captures, or the check that says they are damaged. Raises InputError for a folder that is none."""
    if folder is None:
        return None, []
    try:
        return CaptureReader(folder), []
    except DamagedCaptures as error:
        words = "Nothing can be read of captures that are not whole."
        return None, [Check("captures", "fail", str(error), [refused(error, words)])]


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
    folder = chosen_step(path)
    read_json(folder / "config.json")
    if weights:
        read_headers(folder)


def attempt(name: str, one: Callable[[Given], Check], given: Given) -> Check:
    """Run a check; one whose input is refused has failed, and says why, and the others still run.

    A target whose architecture or quantisation Eyas does not read is no fault of what is checked: skipped.
    """
    try:
        return one(given)
    except Unsupported as error:
        return Check(name, "skipped", f"the target cannot be read: {error.got} ({error.where})")
    except InputError as error:
        return Check(name, "fail", str(error), refusal=refused(error) if error.code else None)


def verdict(checks: list[Check], findings: list[Finding]) -> str:
    """fail with any error; unknown if an essential check could not run; else pass."""
    if any(finding.severity == "error" for finding in findings) or any(one.status == "fail" for one in checks):
        return "fail"
    ran = {one.name for one in checks if one.status == "pass"}
    return "pass" if all(name in ran for name in ESSENTIAL) else "unknown"
