"""Checks that need no weights in memory: what engines would do with a draft, and its vocabulary tables. No torch."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eyas.errors import InputError
from eyas.formats.headers import INDEX, WEIGHTS, read_headers
from eyas.formats.problem import Problem
from eyas.formats.read_config import read_config as read_draft_config
from eyas.formats.taps import IDS_KEY
from eyas.formats.target_config import read_json
from eyas.formats.tensor_values import value_problems
from eyas.formats.vocab_tables import judge_tables, read_tables
from eyas.models.streaming.plan import fits, plan
from eyas.run import cache_folder, is_complete, read_manifest
from eyas.stage import chosen_step
from eyas.wiring.findings import Finding, finding
from eyas.wiring.loaders import LoaderReport, TargetFacts, loader_report, read_target
from eyas.wiring.preflight import parse_launch, preflight

Status = Literal["pass", "fail", "skipped", "unknown"]
PROBE_TOKENS = 256
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
NO_WEIGHTS = "needs a draft folder with its weights"
LEFT_OUT = ("tap identity", "teacher", "TTT parity", "acceptance")
"""Checks that need captures, weights and torch."""


@dataclass
class Check:
    """One check: its status, what it saw, and what it found wrong."""

    name: str
    status: Status
    evidence: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures that outside programs may want, by name."""
    refusal: Finding | None = None
    """Why the check's input was refused, where that has a code; a finding of the same code says it better."""
    blocks: list[tuple[int | None, Any]] = field(default_factory=list)
    """What each block was declared to be, and the match it is (identify.Match): the rows of a heat map."""

    @property
    def as_dict(self) -> dict[str, Any]:
        facts = {"facts": self.facts} if self.facts else {}
        return {"name": self.name, "status": self.status, "evidence": self.evidence, **facts}


def require_paths(*paths: Path | None) -> None:
    """Raise InputError unless something is given to check, and all of it is there: said before torch is loaded."""
    given = [path for path in paths if path is not None]
    absent = [path for path in given if not path.exists()]
    if not given or absent:
        raise InputError(
            wanted="something to check",
            got="no such folder or file" if absent else "neither captures, draft, export nor trace",
            where=str(absent[0].absolute()) if absent else "eyas check",
            next="eyas check --captures RUN/captures --draft RUN/export",
        )


def check_static(draft: Path, engines: Sequence[str], target: str | None = None) -> dict[str, Any]:
    """`eyas check` of a draft folder or bare config.json before engines: no weights in memory, no torch.

    Returns `verdict` (fail with any error, else unknown: nothing was measured), `checks` and `findings`. Raises
    InputError for a path that is no draft, an unknown engine, or a target that is not on this machine.
    """
    facts = None if target is None else find_target(target)
    checks = [check_loader(draft, engine, facts) for engine in engines]
    checks += check_weights(draft, facts)
    checks += [Check(name, "skipped", "needs captures and the target's weights") for name in LEFT_OUT]
    return result(checks, "unknown")


def check_launch(
    engines: Sequence[str],
    engine_args: str,
    draft: Path | None = None,
    target: str | None = None,
    gpu_gb: float | None = None,
) -> dict[str, Any]:
    """`eyas check --engine-args`: a launch before it is tried; `draft` and `target` stand for what it names elsewhere.

    `gpu_gb`: GiB of each GPU of the machine it will run on; without it this machine's GPUs are looked at.
    """
    if len(engines) != 1:
        raise InputError(
            wanted="one engine for one argument list",
            got=", ".join(engines),
            where="--engine",
            next=f"--engine {engines[0]} --engine-args ...",
        )
    if gpu_gb is not None and not 0 < gpu_gb < math.inf:
        got, unit = f"{gpu_gb:g}", "GiB of each GPU, above 0"
        raise InputError(wanted=unit, got=got, where="--gpu-gb", next="--gpu-gb 80")
    launch = parse_launch(engines[0], engine_args)
    local = Path(target) if target is not None and Path(target).exists() else None
    sizes = None if gpu_gb is None else [int(gpu_gb * 2**30)] * (launch.tp * launch.pp)
    seen = preflight(launch, gpu_bytes=sizes, target=local, draft=draft)
    checks = []
    if seen.loader is not None:
        report = seen.loader
        evidence = loader_evidence(report)
        checks.append(Check(f"loader {report.engine}", report.verdict, evidence, report.findings, report.as_dict))
    own = [one for one in seen.findings if seen.loader is None or one not in seen.loader.findings]
    words = "; ".join(f"{name}: {why}" for name, why in seen.skipped.items())
    failed = any(one.severity == "error" for one in own)
    status: Status = "fail" if failed else "unknown" if seen.skipped else "pass"
    evidence = f"{len(own)} finding{'' if len(own) == 1 else 's'}" + (f"; not looked at: {words}" if words else "")
    checks.append(Check("preflight", status, evidence, own, {"memory": seen.memory.as_dict}))
    if draft is not None:
        checks += check_weights(draft)
    checks += [Check(name, "skipped", "needs captures and the target's weights") for name in LEFT_OUT]
    return result(checks, "unknown")


def result(checks: Sequence[Check], otherwise: str) -> dict[str, Any]:
    """`verdict` (fail with any error or failed check, else `otherwise`), `checks`, `findings` (each once)."""
    found = [one for check in checks for one in check.findings]
    unique = list({one.model_dump_json(): one for one in found}.values())
    failed = any(one.severity == "error" for one in unique) or any(check.status == "fail" for check in checks)
    return {
        "verdict": "fail" if failed else otherwise,
        "checks": [check.as_dict for check in checks],
        "findings": [one.model_dump(mode="json") for one in unique],
    }


def check_loader(draft: Path, engine: str, target: TargetFacts | None = None) -> Check:
    """What one engine would do with the draft; a pass for vLLM's V1 runner says it is none for the GPU default."""
    report = loader_report(draft, engine, target)
    found = [*report.findings, *other_runner(report)]
    return Check(f"loader {report.engine}", report.verdict, loader_evidence(report), found, report.as_dict)


def other_runner(report: LoaderReport) -> list[Finding]:
    """Right on vLLM's V1 runner (CPU), and other taps on Model Runner V2, the default on GPUs."""
    v2, wanted = report.gpu_default, report.declared.boundaries
    if v2 is None or wanted is None or report.boundaries != wanted or v2.boundaries in (None, wanted):
        return []
    problem = Problem(
        "tap_offset",
        where="layer ids",
        expected=f"boundaries {list(wanted)} on either runner",
        found=f"{list(v2.boundaries or ())} on Model Runner V2, the default on GPUs ({v2.rule})",
        fix=f"{IDS_KEY} = {list(wanted)} at the top level, which both read; or only ever serve with the V1 runner",
        severity="warning",
    )
    return [finding(problem, str(report.engine))]


def loader_evidence(report: LoaderReport) -> str:
    """The report in a line: what is captured, what was declared, and what the words are good for."""
    got, wanted = report.boundaries, report.declared.boundaries
    captured = f"captures boundaries {list(got)}" if got is not None else "captures: not known"
    declared = f"the draft was trained on {list(wanted)}" if wanted is not None else "the draft's own are not known"
    parts = [f"{captured} ({report.capture.rule})", f"{declared} ({report.declared.boundaries_source})"]
    if report.gpu_default is not None:
        other = report.gpu_default.boundaries
        seen = "not known" if other is None else f"{list(other)}"
        parts.append(f"{report.scope}; Model Runner V2 captures: {seen} ({report.gpu_default.rule})")
    return "; ".join(parts)


def check_tables(draft: Path, target: TargetFacts | None = None) -> Check:
    """d2t and t2d are one increasing map of offsets into the target's vocabulary."""
    name, folder = "vocabulary", chosen_step(draft)
    if not has_weights(folder):
        return Check(name, "skipped", NO_WEIGHTS)
    raw = read_json(folder / "config.json")
    layer = raw.get("transformer_layer_config")
    declared = raw.get("vocab_size", layer.get("vocab_size") if isinstance(layer, dict) else None)
    total = target.vocab_size if target and target.vocab_size else declared
    d2t, t2d = read_tables(folder, read_headers(folder))
    if d2t is None:
        return Check(name, "unknown", "no d2t: right for a whole vocabulary only")
    problems = judge_tables(d2t, t2d, total if type(total) is int else None)
    evidence = f"{len(d2t)} draft tokens of {total}" + ("" if t2d is not None else "; no t2d to compare with")
    return Check(name, "fail" if problems else "pass", evidence, [finding(one, str(folder)) for one in problems])


def check_values(draft: Path) -> Check:
    """Every weight is a finite number."""
    name, folder = "values", chosen_step(draft)
    if not has_weights(folder):
        return Check(name, "skipped", NO_WEIGHTS)
    headers = read_headers(folder)
    problems = value_problems(folder, headers)
    evidence = problems[0].found if problems else f"{len(headers)} tensors, every number finite"
    return Check(name, "fail" if problems else "pass", evidence, [finding(one, str(folder)) for one in problems])


def target_problems(draft: Path, target: TargetFacts) -> list[Problem]:
    """Where a draft's own words of its target's sizes are not this target's: no weights are needed to see that."""
    told = read_draft_config(read_json(chosen_step(draft) / "config.json")).target
    if told is None:
        return []
    sizes = {name: (getattr(told, name), getattr(target, name)) for name in SIZES}
    differing = [name for name, (theirs, this) in sizes.items() if this is not None and theirs != this]
    if not differing:
        return []
    words = [", ".join(f"{name} {sizes[name][which]}" for name in differing) for which in (1, 0)]
    fix = f"--target {told.name}, or a draft of this target; --plain serves it without one"
    return [Problem("target_revision", where="draft", expected=words[0], found=f"{told.name}: {words[1]}", fix=fix)]


def check_weights(draft: Path, target: TargetFacts | None = None) -> list[Check]:
    """What of a draft's weights shows without torch: its vocabulary's tables, its numbers."""
    return [check_tables(draft, target), check_values(draft)]


def has_weights(folder: Path) -> bool:
    return folder.is_dir() and any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def reference_plan(target: str | None, captures: Path | None, draft: Path | None) -> dict[str, Any]:
    """For --plan: how the reference would be computed, and, streamed, what it reads and holds. Headers only.

    {} where the target is not named, or not on this machine. Raises InputError as opening the checkpoint does.
    """
    manifest = read_manifest(captures, "captures") if captures is not None and is_complete(captures) else None
    if target is None and manifest is not None:
        target = manifest.settings.get("target", {}).get("name")
    folder = None if target is None else on_this_machine(target)
    if folder is None or not folder.is_dir():
        return {}
    if fits(folder):
        return {"reference": {"target": str(folder), "how": "loaded whole, in float32"}}
    up_to = None if manifest is None else max(manifest.facts["boundaries"])
    if up_to is None and draft is not None:
        path = draft if draft.is_file() else chosen_step(draft) / "config.json"
        declared = read_draft_config(read_json(path)).boundaries if path.is_file() else None
        up_to = max(declared) if declared else None
    streamed = plan(folder, PROBE_TOKENS, up_to).as_dict
    return {"reference": {"target": str(folder), "how": "streamed, layer by layer", **streamed}}


def find_target(name: str) -> TargetFacts:
    """A target's facts from what is on this machine: a folder, a config.json, or a name in the caches.

    Raises InputError where nothing is found: nothing is downloaded for this.
    """
    found = on_this_machine(name)
    if found is None:
        raise InputError(
            wanted="a target on this machine: a folder, its config.json, or a name in the cache",
            got=repr(name),
            where="--target",
            next="--target path/to/the/target's/config.json",
        )
    return read_target(found)


def on_this_machine(name: str) -> Path | None:
    """Where a target lies on this machine: as a path, in Eyas's cache, or in the hub's; None where it does not."""
    path = Path(name)
    if path.exists():
        return path
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    candidates = [cache_folder() / "targets" / name, *sorted(snapshots.glob("*"))]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)
