"""The check: which wirings were tried over a draft's captures, what each gives, and the one the draft was made for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.data.shards import CaptureReader
from eyas.models.foreign import NamedTarget
from eyas.models.target import Target
from eyas.wiring.findings import Finding
from eyas.wiring.hypotheses.compare import FEWEST_DOCUMENTS
from eyas.wiring.hypotheses.judge import Verdict, evidence, finding_of, judge
from eyas.wiring.hypotheses.load import Parts
from eyas.wiring.hypotheses.measure import STEPS, Rig, choose
from eyas.wiring.hypotheses.wirings import Facts, wirings
from eyas.wiring.identify import identify_taps
from eyas.wiring.reference import boundaries_in_memory, final_normed
from eyas.wiring.static_checks import Check
from eyas.wiring.tap_findings import tap_findings

NAME = "hypotheses"
PROBE = 256
"""Tokens run through the whole target to name captured taps that are not the declared ones."""


def check_hypotheses(target: Target, draft: Path, captures: CaptureReader, recompute: bool = True) -> Check:
    """The draft over captured rows under every near-miss of its declared wiring.

    `recompute` false leaves out the taps that the captures do not hold. Raises InputError for a folder that is no
    draft. `facts` holds every wiring tried; `accept_length` as declared and `accept_length_after` the fix.
    """
    named = NamedTarget(target.identity, target.context_length, target.embedding)
    parts = Parts.of(draft, named, captures.boundaries)
    width = len(captures.boundaries) * captures.hidden_size
    if parts.config.taps_width != width:
        wanted = f"the draft reads {len(parts.config.boundaries)} taps, the captures hold {len(captures.boundaries)}"
        return Check(NAME, "skipped", f"needs captures of as many taps: {wanted}")
    samples = choose(captures, parts.config.draft_vocab_size)
    if len(samples) < FEWEST_DOCUMENTS:
        return Check(NAME, "skipped", f"needs {FEWEST_DOCUMENTS} captured answers or more, has {len(samples)}")
    rig = Rig(target, parts, samples, captures.last_hidden_norm)
    stated = rig.ids_of("declared")
    tried = [
        wiring
        for wiring in wirings(facts_of(target, parts, recompute))
        if wiring.table == "declared" or not torch.equal(rig.ids_of(wiring.table), stated)
    ]
    anew = [boundary for wiring in tried for boundary in wiring.blocks or ()]
    if anew:
        rig.compute_anew(anew)
    verdict = judge(rig, tried)
    found = finding_of(verdict, lambda: name_captured(target, parts, rig, captures.boundaries))
    words = evidence(verdict) + ("" if recompute else "; taps that were not captured: not tried, the target is needed")
    if not found and not verdict.telling:
        words = f"this draft is too weak for its wiring to show: a shifted token costs it nothing; {words}"
        return Check(NAME, "unknown", words, [], figures(verdict))
    return Check(NAME, "fail" if found else "pass", words, found, figures(verdict, found))


def facts_of(target: Target, parts: Parts, recompute: bool = True) -> Facts:
    """What decides which near-misses exist."""
    rope: dict[str, Any] = dict(getattr(target.config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    theta = float(rope.pop("rope_theta", 10_000.0))
    scaling: Mapping[str, Any] | None = None if rope.get("rope_type", "default") == "default" else rope
    scaled = target.identity.model_type.startswith("gemma")
    d2t = parts.tensors.get("d2t")
    return Facts(
        parts.config,
        frozenset(parts.tensors),
        theta,
        scaling,
        blank_d2t=d2t is not None and not d2t.any(),
        target_is_here=recompute,
        tied_target=torch.equal(target.head.weight, target.embedding),
        embedding_scale=scaled,
    )


def name_captured(target: Target, parts: Parts, rig: Rig, told: tuple[int, ...]) -> list[Finding]:
    """What the captured blocks are, by numbers, where the target's own states serve the draft better. `told`: what the
    captures say they are."""
    sample = max(rig.samples, key=lambda one: len(one.ids_T)).cut(PROBE)
    reference = boundaries_in_memory(target, sample.ids_T.tolist())
    matches = identify_taps(sample.taps_TA, reference, final_normed(target, reference[-1]))
    boundaries = parts.config.boundaries
    by = "declared" if boundaries == told else "read by the draft"
    return tap_findings(matches, boundaries, len(reference) - 1, by=by)


def figures(verdict: Verdict, found: Sequence[Finding] = ()) -> dict[str, Any]:
    """For programs: every wiring tried, and the accept length to expect once what was `found` is mended."""
    best = verdict.best or verdict.declared
    return {
        "rows": verdict.rows,
        "documents": verdict.documents,
        "steps": STEPS,
        "code": found[0].code if found else None,
        "accept_length": round(verdict.declared.outcome.accept_length, 4),
        "accept_length_after": round(best.outcome.accept_length, 4),
        "untold": [trial.wiring.name for trial in verdict.untold],
        "wirings": [trial.as_dict for trial in (verdict.declared, *verdict.others)],
    }
