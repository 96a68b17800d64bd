"""A running server's wiring without a restart: its arguments, its draft's folder, its acceptance against `evaluate`'s.

What can be told so: another algorithm, chain or draft than meant; a folder this engine reads otherwise than it was
trained (static rules); and acceptance far below what the evaluator's walk over captures promised, which says that
something is mis-wired but not what: `eyas check --trace` measures that. No torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.clients.acceptance import Acceptance
from eyas.errors import InputError
from eyas.formats.target_config import read_json
from eyas.launch.arguments import Launch
from eyas.wiring.findings import Finding
from eyas.wiring.preflight import preflight
from eyas.wiring.static_checks import Check, check_loader, check_weights, find_target

ENOUGH_ROUNDS = 200
"""Under so many rounds an accept length is noise: its standard error is about 0.06 at one of 1.8."""
FAR = 0.6
"""Share of the promised gain (accept length - 1) under which the wiring is the suspect."""
NEAR = 0.85
SIGNIFICANT = 4.0
"""Standard errors between the served and the promised accept length."""
MISWIRED = "The server feeds its draft something else than it was trained on."
OF_THE_MACHINE = frozenset({"port_busy", "gpu_busy", "memory_short", "disk_short"})
"""Findings of a preflight that a running server has behind it."""


@dataclass(frozen=True)
class Promise:
    """What `evaluate` measured: survival by the walk over greedy answers where it has it, else over rows."""

    survival: tuple[float, ...]
    source: str

    def accept_length(self, depth: float | None) -> float:
        """Of a chain of `depth` tokens, in between where some rounds draft fewer; None: of all that was evaluated."""
        if depth is None:
            return 1 + sum(self.survival)
        whole = int(depth)
        return 1 + sum(self.survival[:whole]) + (depth - whole) * sum(self.survival[whole : whole + 1])


def read_promise(path: Path) -> Promise:
    """An evaluate folder or its result.json. Raises InputError where it is none."""
    file = path / "result.json" if path.is_dir() else path
    raw = read_json(file)
    for key in ("walk_survival", "survival"):
        found = raw.get(key)
        if isinstance(found, list) and found and all(isinstance(share, int | float) for share in found):
            return Promise(tuple(float(share) for share in found), f"{key} of {file}")
    raise InputError(
        wanted="what eyas evaluate wrote", got="JSON without survival", where=str(file), next="eyas evaluate --help"
    )


def promise_beside(draft: Path) -> Path | None:
    """The evaluation of the run that a draft's folder belongs to."""
    candidates = [parent / "evaluate" / "result.json" for parent in list(draft.absolute().parents)[:2]]
    return next((path for path in candidates if path.is_file()), None)


def check_arguments(launch: Launch | None, draft: Path | None, target: str | None) -> Check:
    """What the server was started with, held against the draft: preflight's rules, but those of the machine."""
    name = "server arguments"
    if launch is None:
        return Check(name, "unknown", "the server does not tell them, and its process is not on this machine")
    found = [] if launch.engine.name == "embedded" else _preflighted(launch, draft, target)
    words = f"{launch.engine}: algorithm {launch.algorithm or 'none'}, draft {launch.draft or 'none'}, "
    words += f"num_steps {launch.num_steps}, topk {launch.topk}, num_draft_tokens {launch.num_draft_tokens}"
    if draft is not None and launch.draft is not None and _other_folder(launch.draft, draft):
        found.append(
            Finding(
                code="config_key_wrong",
                severity="error",
                where="the server's draft",
                expected=str(draft.absolute()),
                found=launch.draft,
                fix=f"serve {draft}, or check with --draft {launch.draft}",
                message="The server runs another draft than the one that is checked.",
            )
        )
    failed = any(one.severity == "error" for one in found)
    return Check(name, "fail" if failed else "pass", words, found)


def _preflighted(launch: Launch, draft: Path | None, target: str | None) -> list[Finding]:
    seen = preflight(launch, draft=draft, target=_local(target))
    own = seen.loader.findings if seen.loader is not None else []
    return [one for one in seen.findings if one.code not in OF_THE_MACHINE and one not in own]


def _local(target: str | None) -> Path | None:
    return Path(target) if target is not None and Path(target).exists() else None


def _other_folder(served: str, draft: Path) -> bool:
    path = Path(served)
    return path.exists() and draft.exists() and not path.samefile(draft)


def check_folder(draft: Path | None, engine: str | None, target: str | None) -> list[Check]:
    """What this engine's rules make of the draft's folder."""
    if draft is None:
        return [Check("draft folder", "skipped", "no --draft")]
    if engine is None or engine.startswith(("embedded", "llamacpp")):
        return check_weights(draft)
    facts = None
    if target is not None:
        try:
            facts = find_target(target)
        except InputError:
            facts = None
    return [check_loader(draft, engine, facts), *check_weights(draft)]


def check_acceptance(
    served: Acceptance | None, promise: Promise | None, num_steps: int | None, suspects: Sequence[Finding] = ()
) -> Check:
    """The served acceptance, position by position, against the promised."""
    name = "acceptance"
    if served is None:
        return Check(name, "unknown", "no round counted yet: send it something, or --send 8")
    facts: dict[str, Any] = {"served": served.as_dict}
    words = f"accept length {served.accept_length:.2f} served"
    if served.rounds is not None:
        words += f" over {served.rounds} rounds"
    if promise is None:
        return Check(name, "unknown", f"{words}; nothing to compare with: --evaluate RUN/evaluate", [], facts)
    steps = num_steps or (len(served.survival) if served.survival is not None else None)
    # A server that drafts less than it may (a depth that adapts) is held to what it drafted; a tree drafts more.
    shallow = served.drafted is not None and (steps is None or served.drafted < steps)
    promised = promise.accept_length(served.drafted if shallow else steps)
    facts |= {"promised": {"accept_length": round(promised, 4), "survival": list(promise.survival[:steps])}}
    words += f", {promised:.2f} promised ({promise.source})"
    if served.survival is not None:
        pairs = zip(served.survival, promise.survival, strict=False)
        words += "; by position " + ", ".join(f"{now:.2f} of {then:.2f}" for now, then in pairs)
    if served.rounds is not None and served.rounds < ENOUGH_ROUNDS:
        return Check(name, "unknown", f"{words}; under {ENOUGH_ROUNDS} rounds say nothing: --send 8", [], facts)
    share = (served.accept_length - 1) / (promised - 1) if promised > 1 else 1.0
    facts["share_of_promised_gain"] = round(share, 4)
    if share >= NEAR:
        return Check(name, "pass", words, [], facts)
    far = share < FAR and _apart(served, promise, promised, steps)
    first = next((one for one in suspects if one.severity == "error"), None)
    fix = first.fix if first is not None else "eyas serve --trace, one long prompt, then eyas check --trace"
    finding = Finding(
        code="parity_mismatch",
        severity="error" if far else "warning",
        where="acceptance of the running server",
        expected=f"accept length {promised:.2f} or a little less on other prompts",
        found=f"{served.accept_length:.2f}: {share:.0%} of the promised gain",
        fix=fix,
        message=first.message if first is not None else MISWIRED,
    )
    return Check(name, "fail" if far else "pass", words, [finding], facts)


def _apart(served: Acceptance, promise: Promise, promised: float, steps: int | None) -> bool:
    """Whether the difference is more than noise, by the variance of an accepted count under the promised survival."""
    if served.rounds is None:
        return True
    shares = promise.survival[:steps]
    mean = sum(shares)
    square = sum((2 * index + 1) * share for index, share in enumerate(shares))
    error = math.sqrt(max(square - mean * mean, 1e-9) / served.rounds)
    return (promised - served.accept_length) / error >= SIGNIFICANT
