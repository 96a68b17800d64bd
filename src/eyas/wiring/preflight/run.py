"""Everything that can be known of a launch before it is tried, in seconds and from headers alone. No torch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.formats.config_problems import Config
from eyas.formats.headers import INDEX, WEIGHTS, TensorHeader, read_headers
from eyas.formats.problem import Problem
from eyas.formats.target_config import read_json
from eyas.formats.tensor_list import block_of
from eyas.launch.arguments import Launch
from eyas.launch.gpus import Gpu, gpus
from eyas.stage import chosen_step
from eyas.wiring.findings import Finding, findings
from eyas.wiring.loaders import LoaderReport, TargetFacts, loader_report
from eyas.wiring.preflight.conflicts import Setting, conflicts
from eyas.wiring.preflight.machine import gpu_problems, port_problem
from eyas.wiring.preflight.memory import MemoryPlan, memory_problems, plan_memory

CONFIG = "config.json"
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


@dataclass(frozen=True)
class Preflight:
    """What a launch would run into. `skipped` names what could not be looked at, and why."""

    launch: Launch
    problems: tuple[Problem, ...]
    memory: MemoryPlan
    loader: LoaderReport | None
    skipped: dict[str, str]

    @property
    def findings(self) -> list[Finding]:
        own = self.loader.findings if self.loader is not None else []
        return own + findings(self.problems, "launch")

    @property
    def verdict(self) -> str:
        """fail with any error, unknown where something could not be looked at, else pass."""
        if any(found.severity == "error" for found in self.findings):
            return "fail"
        return "unknown" if self.skipped else "pass"


def preflight(
    launch: Launch,
    *,
    gpu_bytes: Sequence[int] | None = None,
    baseline: Launch | None = None,
    target: Path | None = None,
    draft: Path | None = None,
) -> Preflight:
    """Check a launch: memory, port, GPUs, draft tensors, flags.

    `gpu_bytes`: memory of each GPU, for a machine other than this one (then this one's GPUs are not looked at).
    `baseline`: the plain server it will be compared with. `target`, `draft`: local folders (or config.json files) of
    what the launch names, where it names hub ids. Raises InputError for a folder that cannot be read.
    """
    skipped: dict[str, str] = {}
    target = target or _local(launch.target, "target", skipped)
    draft = draft or (_local(launch.draft, "draft", skipped) if launch.draft else None)
    if draft is not None and launch.draft is None:
        launch = replace(launch, draft=str(draft))
    target_raw, target_headers = _folder(target)
    draft_raw, draft_headers = _folder(None if draft is None else chosen_step(draft))
    facts = _facts(target_raw, launch)
    report = None
    if draft is not None:
        report = loader_report(draft_raw, launch.engine, facts, headers=draft_headers)
    setting = _setting(launch, facts, target_raw, draft_raw, draft_headers, report, baseline)
    found = gpus() if gpu_bytes is None else None
    sizes = gpu_bytes if gpu_bytes is not None else [gpu.total for gpu in found or ()]
    memory = plan_memory(launch, target_raw, target_headers, draft_raw, draft_headers, sizes)
    problems = [*conflicts(setting), *memory_problems(memory, launch, facts), *_machine(launch, found, skipped)]
    if not sizes:
        skipped["memory"] = "no GPU here and none given (--gpu-gb)"
    if draft is not None and draft_headers is None:
        skipped["draft tensors"] = "a config.json without weights"
    if target_headers is None:
        skipped["weights"] = "the target's weights are not on this machine"
    return Preflight(launch, tuple(problems), memory, _lenient(report, launch), skipped)


def _local(name: str | None, what: str, skipped: dict[str, str]) -> Path | None:
    """A named model's folder where it is on this machine."""
    if name is None:
        skipped[what] = "not named"
        return None
    path = Path(name)
    if path.exists():
        return path
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    snapshots = sorted((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
    if snapshots:
        return snapshots[-1]
    skipped[what] = f"{name} is not on this machine"
    return None


def _folder(path: Path | None) -> tuple[Config, Mapping[str, TensorHeader] | None]:
    """config.json and headers of a folder; of a bare config.json no headers; of nothing, nothing."""
    if path is None:
        return {}, None
    if not path.is_dir():
        return read_json(path), None
    has_weights = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    return read_json(path / CONFIG), read_headers(path) if has_weights else None


def _facts(target_raw: Config, launch: Launch) -> TargetFacts:
    facts = TargetFacts.of(target_raw) if target_raw else TargetFacts()
    limited = launch.context_length or facts.context_length
    return replace(facts, context_length=limited)


def _setting(
    launch: Launch,
    facts: TargetFacts,
    target_raw: Config,
    draft_raw: Config,
    headers: Mapping[str, TensorHeader] | None,
    report: LoaderReport | None,
    baseline: Launch | None,
) -> Setting:
    declared = report.declared if report is not None else None
    block = report.block if report is not None else None
    if block is None and headers:
        block = block_of(headers)
    eyas: Any = draft_raw.get("eyas")
    length = eyas.get("ttt_length") if isinstance(eyas, Mapping) else None
    return Setting(
        launch=launch,
        target=facts,
        target_raw=target_raw,
        draft_raw=draft_raw,
        draft_block=block,
        eyas=declared.config if declared is not None and declared.format == "eyas" else None,
        ttt_length=length if type(length) is int else None,
        baseline=baseline,
    )


def _machine(launch: Launch, found: list[Gpu] | None, skipped: dict[str, str]) -> list[Problem]:
    port = port_problem(launch.listens_on)
    problems = [] if port is None else [port]
    if found is None:
        skipped["busy GPUs"] = "no NVIDIA driver here, or another machine's memory given"
        return problems
    return problems + gpu_problems(found, launch.tp * launch.pp)


def _lenient(report: LoaderReport | None, launch: Launch) -> LoaderReport | None:
    """What a flag or the environment settles: a longer context by force, a window by the server."""
    if report is None:
        return None
    forced = launch.env.get(LONGER, "").lower() in ("1", "true", "yes")
    kept = []
    for problem in report.problems:
        if problem.code == "context_too_short" and forced and launch.sglang:
            problem = replace(problem, severity="warning", found=f"{problem.found}, but {LONGER} raises it")
        if problem.code == "sliding_window" and launch.draft_window is not None and report.block != "mla":
            continue  # `conflicts` compares the flag with the draft
        kept.append(problem)
    return replace(report, problems=tuple(kept))
