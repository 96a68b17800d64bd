"""A server's log says which layers it reads: held at once against what its draft was trained on. No torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from eyas.errors import InputError
from eyas.formats.engines import parse_engine
from eyas.formats.taps import TapKeys, said
from eyas.launch.arguments import Launch, parse_launch
from eyas.launch.find import Found, words_of
from eyas.launch.log_state import LogState
from eyas.launch.said_taps import SaidTaps
from eyas.shipped import draft_folder
from eyas.wiring.findings import Finding
from eyas.wiring.loaders import said_against
from eyas.wiring.static_checks import find_target, on_this_machine

ENGINE = "vllm"
"""The one that says so (launch/said_taps.py)."""
BEHIND_LOADING = ("compile", "kv_cache", "graphs", "http", "warmup", "ready")
NO_DRAFT = "its draft is not known: --draft FOLDER"


@dataclass(frozen=True)
class TapsLook:
    """The layers in the engine's numbers and as boundaries, and the draft's own. None: not known."""

    said: SaidTaps | None
    """None: vLLM's V1 runner drafts and named none, which means the default of the target's class."""
    boundaries: tuple[int, ...] | None
    draft: str | None = None
    declared: tuple[int, ...] | None = None
    findings: tuple[Finding, ...] = ()
    unknown: str | None = None
    """Why the two were not compared."""

    @property
    def agrees(self) -> bool | None:
        return None if self.unknown is not None else self.boundaries == self.declared

    @property
    def as_dict(self) -> dict[str, Any]:
        """`taps` of `eyas watch --json`."""
        return {
            "engine": ENGINE,
            "ids": None if self.said is None else list(self.said.ids),
            "source": "model" if self.said is None else self.said.source,
            "boundaries": None if self.boundaries is None else list(self.boundaries),
            "draft": self.draft,
            "declared": None if self.declared is None else list(self.declared),
            "agrees": self.agrees,
            "unknown": self.unknown,
        }


class TapsWatch:
    """Compares once for each list that a log tells; `draft` and `target` are folders or names."""

    def __init__(self, draft: str | None, target: str | None = None, engine: str = ENGINE) -> None:
        self.draft, self.target = draft, target
        self.engine = engine if engine.startswith(ENGINE) else ENGINE
        self.latest: TapsLook | None = None

    def look(self, log: LogState | None) -> TapsLook | None:
        """What the log says by now; None where it says nothing, and its silence means nothing."""
        told = None if log is None else log.taps
        if told is None and (log is None or self.draft is None or not silent(log)):
            self.latest = None
        elif self.latest is None or self.latest.said != told:
            self.latest = self._compare(told)
        return self.latest

    @property
    def findings(self) -> tuple[Finding, ...]:
        return () if self.latest is None else self.latest.findings

    @property
    def as_dict(self) -> dict[str, Any]:
        """Keys of `eyas watch --json`."""
        latest = None if self.latest is None else self.latest.as_dict
        return {"taps": latest, "findings": [one.model_dump(mode="json") for one in self.findings]}

    def _compare(self, told: SaidTaps | None) -> TapsLook | None:
        folder = None if self.draft is None else on_this_machine(self.draft)
        if folder is None:
            why = NO_DRAFT if self.draft is None else f"{self.draft} is not on this machine: --draft FOLDER"
            return self._alone(told, why)
        try:
            facts = None if self.target is None or on_this_machine(self.target) is None else find_target(self.target)
            ids, source = (None, "model") if told is None else told
            found = said_against(folder, self.engine, ids, source, facts)
        except InputError as error:
            return self._alone(told, f"{error.where}: {error.got}")
        unknown = None
        if found.declared is None:
            unknown = f"what the draft was trained on is not known ({found.declared_source})"
        elif found.boundaries is None:
            unknown = "the target's class is not one whose layers are known"
        if told is None and unknown is not None:
            return None
        return TapsLook(told, found.boundaries, self.draft, found.declared, found.findings, unknown)

    def _alone(self, told: SaidTaps | None, why: str) -> TapsLook | None:
        if told is None:
            return None
        capture = said(parse_engine(ENGINE), told.ids, told.source, TapKeys(), None, None)
        return TapsLook(told, capture.boundaries or capture.unbounded, self.draft, unknown=why)


def silent(log: LogState) -> bool:
    """Whether a drafting V1 runner is past where it names the layers of a draft's config, and named none."""
    drafts = log.runner == "v1" and "draft_weights" in log.phase_starts
    return log.taps is None and drafts and log.phase in BEHIND_LOADING


def taps_of(found: Found, draft: str | None = None) -> TapsWatch:
    """Of a server that was found; `draft` stands for what it was started with.

    Raises InputError where `draft` is not on this machine.
    """
    draft = None if draft is None else str(_here(draft))
    if found.server is not None:
        server = found.server
        return TapsWatch(draft or server.draft, server.target, server.key.get("engine", server.engine))
    launch = None if found.pid is None or found.engine != ENGINE else _launch(found.pid)
    return TapsWatch(draft) if launch is None else TapsWatch(draft or launch.draft, launch.target)


def _here(draft: str) -> Path:
    folder = on_this_machine(str(draft_folder(draft)))
    if folder is None:
        raise InputError(
            wanted="a draft on this machine: a folder, its config.json, or a name in the cache",
            got=repr(draft),
            where="--draft",
            next="--draft runs/demo/export",
        )
    return folder


def _launch(pid: int) -> Launch | None:
    """What somebody else's process was started with, its paths seen from where it stands; None where that is hidden."""
    try:
        launch = parse_launch(ENGINE, words_of(pid)[1:])
        folder = Path(psutil.Process(pid).cwd())
    except (InputError, psutil.Error):
        return None

    def seen(name: str | None) -> str | None:
        return str(folder / name) if name is not None and (folder / name).exists() else name

    return replace(launch, target=seen(launch.target), draft=seen(launch.draft))
