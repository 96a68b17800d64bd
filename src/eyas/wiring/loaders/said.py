"""What a starting engine says that it reads, against what the draft was trained on. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.formats.config_problems import Config
from eyas.formats.engines import Engine
from eyas.formats.taps import TapSource, said, unsaid
from eyas.wiring.findings import Finding, findings
from eyas.wiring.loaders.case import Case, TargetFacts
from eyas.wiring.loaders.report import loader_report
from eyas.wiring.loaders.wiring_rules import taps_problems


@dataclass(frozen=True)
class Said:
    """Both lists as boundaries; None: not known."""

    boundaries: tuple[int, ...] | None
    declared: tuple[int, ...] | None
    declared_source: str
    findings: tuple[Finding, ...] = ()
    """Those of the static checks, where the two differ."""


def said_against(
    draft: Path | Config,
    engine: str | Engine,
    ids: Sequence[int] | None,
    source: TapSource,
    target: TargetFacts | None = None,
) -> Said:
    """An engine whose log says that it reads layers `ids`, against a draft's folder, its config.json or the content.

    `ids` None: vLLM's V1 runner, which drafts and named none. Raises InputError for a path that is no draft and for an
    unknown engine.
    """
    report = loader_report(draft, engine, target)
    facts, declared = report.target, report.declared
    target_type, layers = facts.model_type, facts.num_hidden_layers
    if ids is None:
        capture = unsaid(report.engine, declared.keys, target_type, layers)
    else:
        capture = said(report.engine, ids, source, declared.keys, target_type, layers)
    boundaries = capture.boundaries if capture.boundaries is not None else capture.unbounded
    differ = None not in (boundaries, declared.boundaries) and boundaries != declared.boundaries
    case = Case(report.view, declared, facts, capture, None, None)
    problems = (*capture.problems, *taps_problems(case)) if differ else ()
    found = findings(problems, f"{report.engine.name}'s log")
    return Said(boundaries, declared.boundaries, declared.boundaries_source, tuple(found))
