"""Is the draft that an engine runs the draft in the folder? And do two traces show the same computation?

An engine leaves a tensor it did not find random, drops one it does not know, and says nothing. So each stage of a trace
is computed again, by the folder's weights, from what the trace says the stage was given.

Shapes: T rows, H hidden, A width of the concatenated taps, D draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from eyas.data.foreign import trace_tensor
from eyas.data.shards import CaptureReader
from eyas.engine.cache import KVCache
from eyas.errors import InputError
from eyas.formats.trace import Record, Trace
from eyas.models.checkpoint import has_info, read_info
from eyas.models.draft import Draft, ParallelDraft
from eyas.models.target import Target
from eyas.stage import chosen_step
from eyas.wiring.compare import OTHER, SAME, Traced, check_lines_of, check_trace, distance, finding_of
from eyas.wiring.findings import Finding
from eyas.wiring.static_checks import Check

ALLOWED, WRONG = {"float32": 1e-3}, {"float32": 1e-2}
"""Median relative distance of rows that one computation may differ by, and from which it is another; in half precision
as captures (SAME, OTHER)."""
FEWEST_TOKENS = 4
STAGES = {
    "taps": "what fc is given is not the taps after the folder's norms",
    "fc": "fc, or the norms before it, are not those of the folder",
    "layer": "the decoder layer is not the folder's, or is wired otherwise (norms, residual, rope, attention)",
    "logits": "norm or lm_head are not the folder's",
}


@torch.inference_mode()
def check_draft_of(traced: Traced, draft: Draft | None, lacks: str) -> Check:
    """fc, layer and logits of a prompt's draft rows, computed again by `draft` (float32) from what each was given."""
    name = f"trace draft ({traced.path.name})"
    if draft is None:
        return Check(name, "skipped", f"needs {lacks}")
    if traced.trace is None or not traced.trace.of("fc"):
        return Check(name, "skipped", "needs a trace of an engine that drafts")
    if not traced.dumps:
        return Check(name, "skipped", traced.too_little())
    stages = first_prompt(traced.trace)
    if stages is None:
        return Check(name, "skipped", "no prompt whose draft rows begin at position 0")
    result, lines = Check(name, "pass", ""), []
    for stage, given, got in recomputed(traced.trace, stages, draft):
        if given.shape[-1] != got.shape[-1]:
            result.findings.append(width_finding(stage, given, got, traced.where))
            continue
        apart = distance(got, given)
        lines.append(f"{stage} differs by {percent(apart, 2)}")
        allowed = ALLOWED.get(stages.fc.dtype, SAME)
        if apart >= WRONG.get(stages.fc.dtype, OTHER):
            result.findings.append(draft_finding(stage, apart, allowed, traced.where))
        elif apart > allowed:
            result.status = "unknown"
    result.status = "fail" if result.findings else result.status
    result.evidence = f"recomputed from the folder over {stages.fc.shape[-2]} rows: " + ", ".join(lines)
    return result


@dataclass(frozen=True)
class PromptStages:
    """The records of one prompt's draft forward, and the target's own taps of its rows."""

    captured: tuple[Record, ...]
    taps: Record
    fc: Record
    layer: Record | None
    logits: Record | None


def first_prompt(trace: Trace) -> PromptStages | None:
    """The first draft forward over rows 0, 1, ... whose tensors are there."""
    for _, records in trace.calls():
        stored = [one for one in records if one.tensor is not None and not one.step]
        captured = tuple(one for one in stored if one.stage == "tap")
        by_stage = {stage: next((one for one in stored if one.stage == stage), None) for stage in STAGES}
        taps, fc = by_stage["taps"], by_stage["fc"]
        if taps is not None and fc is not None and (taps.positions or (None,))[0] == 0:
            return PromptStages(captured, taps, fc, by_stage["layer"], by_stage["logits"])
    return None


def recomputed(trace: Trace, stages: PromptStages, draft: Draft) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Stage, the folder's own output, the engine's, row by row."""
    taps, fused = trace_tensor(trace, stages.taps).float(), trace_tensor(trace, stages.fc).float()
    if taps.shape[-1] == draft.config.taps_width:
        # An engine's hook on fc sees what it is given: norms before it have run.
        normed = trace.header.source != "eyas"
        if normed and len(stages.captured) == len(draft.config.boundaries):
            raw = torch.cat([trace_tensor(trace, tap).float()[: len(taps)] for tap in stages.captured], dim=-1)
            yield "taps", draft.before_fc(raw), taps
        yield "fc", draft.fc(taps) if normed else draft.fuse(taps), fused
    if stages.layer is None:
        return
    fed = trace_tensor(trace, stages.layer).float()
    ids, positions = stages.layer.ids, stages.layer.positions
    if ids is not None and len(ids) == len(fed) and fused.shape[-1] == draft.config.hidden_size:
        start, states = 0 if positions is None else positions[0], states_of(draft, fused, len(ids))
        if len(states) == len(ids):
            yield "layer", forward(draft, states, ids, start), fed
    if stages.logits is not None and fed.shape[-1] == draft.config.hidden_size:
        last = fed[-1:]
        own = draft.lm_head(last if draft.config.norm_output else draft.norm(last))
        yield "logits", own, trace_tensor(trace, stages.logits).float()[-1:]


def states_of(draft: Draft, fused_TH: Tensor, rows: int) -> Tensor:
    """What a forward's rows were fed. A P-EAGLE proposer leaves the last row of a long prompt to the next forward, and
    follows the last row with placeholders."""
    if isinstance(draft, ParallelDraft):
        masks = max(0, rows - len(fused_TH))
        return torch.cat([fused_TH[:rows], draft.mask_state()[0].expand(masks, -1)])
    return fused_TH


def forward(draft: Draft, fused_TH: Tensor, ids: Sequence[int], start: int) -> Tensor:
    """One causal forward of the draft over a prompt: what the next step would be fed [T, H]."""
    cache = KVCache(fused_TH.dtype)
    cache.reserve(len(ids))
    cache.begin(0, len(ids), by_position=False)
    rope = draft.rope(torch.arange(start, start + len(ids))[None])

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cache.attend(layer, query, key, value, window=draft.config.sliding_window)

    return draft.feedback(draft(torch.tensor([list(ids)]), fused_TH[None], rope, attend))[0]


@torch.inference_mode()
def check_tokens_of(traced: Traced, draft: Draft | None, lacks: str) -> Check:
    """The id that the next step embeds is the target's id of the best draft logit, by the folder's table."""
    name = f"trace tokens ({traced.path.name})"
    if draft is None:
        return Check(name, "skipped", f"needs {lacks}")
    drafted = [] if traced.trace is None else list(drafted_tokens(traced.trace, draft.config.draft_vocab_size))
    if len(drafted) < FEWEST_TOKENS:
        return Check(name, "skipped", f"{len(drafted)} drafted tokens with their logits: trace a chain of 2 or more")
    best, fed = torch.tensor(drafted).T
    if not bool((best < len(draft.d2t)).all()):
        return Check(name, "skipped", "logits of another vocabulary than the draft's")
    readings = {"": draft.target_ids(best), "d2t_missing": best, "d2t_absolute": draft.d2t[best]}
    hits = {code: int((ids == fed).sum()) for code, ids in readings.items()}
    reading = max(hits, key=lambda code: hits[code])
    evidence = f"of {len(fed)} drafted tokens {hits['']} are the best logit's, by the folder's d2t"
    result = Check(name, "pass", evidence)
    if hits[reading] < 0.9 * len(fed):  # drafting by sampling, say
        result.status = "unknown"
    elif reading:
        fix = "serve the folder that is checked: d2t is an offset, target id = draft id + d2t[draft id]"
        words = {"d2t_missing": "draft ids as if they were target ids", "d2t_absolute": "d2t as if it held target ids"}
        found = f"{words[reading]} ({hits[reading]} of {len(fed)})"
        message = "The engine drafts other tokens than the draft means."
        result.findings.append(finding_of(reading, traced.where, "draft id + d2t[draft id]", found, fix, message))
        result.status = "fail"
    return result


def drafted_tokens(trace: Trace, draft_vocab_size: int) -> Iterator[tuple[int, int]]:
    """Best draft id of a step, and the id that the step after it embedded; of steps that drafted one token."""
    for _, records in trace.calls():
        logits = {one.step: one for one in records if one.stage == "logits" and one.tensor is not None}
        for layer in (one for one in records if one.stage == "layer" and one.step):
            scored = logits.get(layer.step - 1) if layer.step else None
            if scored is not None and layer.ids is not None and len(layer.ids) == 1:
                rows = trace_tensor(trace, scored)
                if rows.numel() == draft_vocab_size:
                    yield int(rows.argmax()), layer.ids[0]


def percent(apart: float, places: int = 0) -> str:
    """A distance in words; what lies beyond ten times the state itself is only called so (random memory, overflow)."""
    return f"{apart:.{places}%}" if apart < 10 else "more than 1,000 %"


def draft_finding(stage: str, apart: float, allowed: float, where: str) -> Finding:
    return finding_of(
        "parity_mismatch",
        f"{where}: {stage}",
        f"what the folder's weights give, within {allowed:.1%}",
        f"{percent(apart)} away",
        "eyas inspect DRAFT --engine ENGINE@VERSION lists the tensors that engine ignores or leaves random",
        f"The engine runs another draft than the folder holds: {STAGES[stage]}.",
    )


def width_finding(stage: str, given: Tensor, got: Tensor, where: str) -> Finding:
    return finding_of(
        "shape_mismatch",
        f"{where}: {stage}",
        f"width {given.shape[-1]}",
        f"width {got.shape[-1]}",
        "serve the folder that is checked",
        "The engine runs a draft of another shape.",
    )


# Two traces ---------------------------------------------------------------------------------------------------------


def compare_traces(first: Trace, second: Trace) -> Check:
    """Stage by stage, in order: the first stage at which they part is the finding.

    Tensors are compared where both have them, else shapes, statistics and first values. Different texts are refused by
    their ids.
    """
    name = f"{first.folder.name} and {second.folder.name}"
    pairs = list(paired(first, second))
    if not pairs:
        return Check(name, "skipped", "no stage that both have recorded")
    worst: dict[str, float] = {}
    for mine, theirs in pairs:
        if mine.ids is not None and theirs.ids is not None and mine.ids != theirs.ids:
            evidence = f"call {mine.call}, {mine.stage}: other tokens ({list(mine.ids[:6])}, {list(theirs.ids[:6])})"
            return Check(name, "unknown", f"{spread(worst)}; then the texts part: {evidence}")
        apart = difference(first, mine, second, theirs)
        worst[mine.stage] = max(worst.get(mine.stage, 0.0), apart)
        allowed = ALLOWED["float32"] if mine.dtype == theirs.dtype == "float32" else SAME
        if apart >= (OTHER if allowed == SAME else SAME):
            found = f"{apart:.1%} away" if mine.shape == theirs.shape else f"{mine.shape} and {theirs.shape}"
            where = f"call {mine.call}, {mine.stage}" + ("" if mine.index is None else f" {mine.index}")
            message = "Every stage before it agrees: what makes this one is what differs."
            fix = f"look at what feeds {mine.stage}"
            return Check(
                name,
                "fail",
                spread(worst),
                [finding_of("parity_mismatch", where, f"equal within {allowed:.1%}", found, fix, message)],
            )
    return Check(name, "pass", f"{len(pairs)} records: {spread(worst)}")


def spread(worst: dict[str, float]) -> str:
    return ", ".join(f"{stage} at most {apart:.2%}" for stage, apart in worst.items()) or "nothing compared"


def paired(first: Trace, second: Trace) -> Iterator[tuple[Record, Record]]:
    """Records of the same call, stage, step and tap, in the first's order."""

    def key(record: Record) -> tuple[int, str, int | None, int | None]:
        return record.call, record.stage, record.step, record.index

    others = {key(record): record for record in second.records if record.shape}
    for record in first.records:
        if record.shape and (twin := others.get(key(record))) is not None:
            yield record, twin


def difference(first: Trace, mine: Record, second: Trace, theirs: Record) -> float:
    """Relative difference; infinite for other shapes (leading ones aside: one engine has a batch dimension)."""
    if [n for n in mine.shape if n != 1] != [n for n in theirs.shape if n != 1]:
        return float("inf")
    if mine.tensor is not None and theirs.tensor is not None:
        return distance(trace_tensor(first, mine), trace_tensor(second, theirs))
    if None in (mine.norm, theirs.norm, mine.deviation, theirs.deviation):
        return 0.0 if mine.norm == theirs.norm else float("inf")
    scale = max(abs(theirs.deviation or 0.0), 1e-12)
    values = [
        (mine.mean, theirs.mean),
        (mine.deviation, theirs.deviation),
        *zip(mine.first, theirs.first, strict=False),
    ]
    apart = [abs(a - b) / scale for a, b in values if a is not None and b is not None]
    apart.append(abs((mine.norm or 0.0) - (theirs.norm or 0.0)) / max(theirs.norm or 0.0, 1e-12))
    return max(apart)


def trace_checks(
    paths: Sequence[Path],
    reference: Target | Path | None,
    captures: CaptureReader | None,
    draft: Draft | None,
    folder: Path | None = None,
    device: torch.device | str = "cpu",
) -> list[Check]:
    """Every check of the traces and dumps at `paths`; of two, also each other's.

    What must have been captured is what the draft was trained on, else what the captures hold. `folder` is the draft's,
    where the draft itself could not be loaded. Raises InputError for a path that is neither trace nor dump.
    """
    read = [Traced.read(path) for path in paths]
    wanted = None if captures is None else captures.boundaries
    if draft is not None:
        wanted = draft.config.boundaries
    elif folder is not None and has_info(folder):
        wanted = read_info(chosen_step(folder)).draft.boundaries
    exact = None if draft is None else draft.float()
    lacking = [] if folder is not None or draft is not None else ["the draft's folder (--draft)"]
    lacking += [] if isinstance(reference, Target) else ["the target in memory (--target)"]
    lacks = " and ".join(lacking) or "a draft that loads (the vocabulary check says why this one does not)"
    checks: list[Check] = []
    for traced in read:
        checks += check_lines_of(traced)
        checks += check_trace(traced, reference, captures, wanted, device)
        checks += [check_draft_of(traced, exact, lacks), check_tokens_of(traced, exact, lacks)]
    return checks + [check_pair(one, other) for one, other in pairwise(read)]


def check_pair(first: Traced, second: Traced) -> Check:
    """Raises InputError where one of them is a dump: it has no stages."""
    for one in (first, second):
        if one.trace is None:
            raise InputError(
                wanted="two traces", got=f"a dump ({one.where})", where="--trace", next="give the dump alone"
            )
    assert first.trace is not None and second.trace is not None
    return compare_traces(first.trace, second.trace)
