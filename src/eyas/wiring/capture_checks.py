"""Are captures what they say they are? Their bytes, masks, the boundary of each block, and the teacher in them.

Shapes: T tokens of a sample.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from eyas.data.shards import CaptureReader, Sample
from eyas.run import hash_file
from eyas.wiring.findings import Finding
from eyas.wiring.given import NO_PROBE, Given
from eyas.wiring.identify import block_facts, identify_taps
from eyas.wiring.reference import final_normed, num_hidden_layers
from eyas.wiring.static_checks import Check
from eyas.wiring.tap_findings import shift_finding, tap_findings
from eyas.wiring.teacher import (
    NEAR,
    agreeing_shift,
    next_token_nats,
    norm_state,
    reading_shown,
    teacher_divergence,
)

HASHED = 1_000_000_000
"""Bytes of shards whose checksums are computed: a second or two. `eyas inspect --verify` reads them all."""
MASKS = 2000
"""Samples whose masks are looked at."""
MOSTLY = 0.9
MASK_SHIFTS = (0, 1, -1, 2, -2, 3, -3)
NEARBY = 2.0
"""Nats a token up to which states are the target's own under coarser weights, rather than another target's."""


def check_data(given: Given) -> Check:
    """The shards' bytes are those of their checksums, and the masks begin where the answers do."""
    name = "captures"
    if given.captures is None:
        return Check(name, "skipped", "needs captures")
    reader = given.captures
    corrupt, hashed, shards = corrupt_shards(reader)
    masks = mask_findings(reader)
    words = [f"{len(reader)} samples, {sum(entry.length for entry in reader.samples):,} tokens in {shards} shards"]
    words.append(f"checksums of {hashed} compared" + ("" if hashed == shards else " (inspect --verify: of all)"))
    words.append(f"masks of {min(len(reader), MASKS)} samples")
    found = [*corrupt, *masks]
    failed = any(one.severity == "error" for one in found)
    return Check(name, "fail" if failed else "pass", "; ".join(words), found)


def corrupt_shards(reader: CaptureReader) -> tuple[list[Finding], int, int]:
    """A finding for each shard whose bytes differ; how many were hashed, of how many."""
    names = sorted({entry.shard for entry in reader.samples})
    sizes = accumulate((reader.folder / name).stat().st_size for name in names)
    chosen = [name for index, (name, size) in enumerate(zip(names, sizes, strict=True)) if not index or size <= HASHED]
    wrong = [name for name in chosen if hash_file(reader.folder / name) != reader.manifest.files[name]]
    found = [
        Finding(
            code="data_corrupt",
            severity="error",
            where=str(reader.folder / name),
            expected=f"bytes of checksum {reader.manifest.files[name][:12]}...",
            found=f"checksum {hash_file(reader.folder / name)[:12]}...",
            fix=f"remove manifest.json and {name}, then run the capture stage again: it makes that shard anew",
            message="The shard was changed, or damaged, after it was written.",
        )
        for name in wrong
    ]
    return found, len(chosen), len(names)


def mask_findings(reader: CaptureReader) -> list[Finding]:
    """Samples that teach nothing, and masks that begin before or after their answers."""
    where = f"{reader.folder.name}: loss_mask"
    empty, shifts = [], Counter[int]()
    for number, entry in enumerate(reader.samples[:MASKS]):
        mask_T = reader.mask(number)
        if not mask_T.any():
            empty.append(entry.id)
        elif (shift := shift_of(mask_T, entry.prompt_tokens)) is not None:
            shifts[shift] += 1
    found = [] if not empty else [empty_finding(empty, len(reader.samples[:MASKS]), where)]
    if shifts:
        shift, count = shifts.most_common(1)[0]
        if shift and count >= MOSTLY * shifts.total():
            found.append(mask_finding(shift, count, shifts.total(), where))
    return found


def shift_of(mask_T: Tensor, prompt_tokens: int) -> int | None:
    """By how many tokens a mask is late (negative: early) against an answer that ends the sample; 0 where no shift fits
    better, None where none fits: other masks (several turns) are not judged here."""
    at_T = torch.arange(len(mask_T))
    fits = {shift: float((mask_T == (at_T >= prompt_tokens + shift)).float().mean()) for shift in MASK_SHIFTS}
    best = max(fits, key=lambda shift: fits[shift])
    return best if fits[best] >= MOSTLY else None


def empty_finding(empty: Sequence[str], of: int, where: str) -> Finding:
    shown = ", ".join(empty[:3]) + (", ..." if len(empty) > 3 else "")
    return Finding(
        code="mask_empty",
        severity="error",
        where=where,
        expected="an answer's tokens marked in every sample",
        found=f"none in {len(empty)} of {of} samples: {shown}",
        fix="capture again with a max_length beyond the prompts, or mend the roles that the mask is made from",
        message="These samples cost time and teach nothing.",
    )


def mask_finding(shift: int, count: int, of: int, where: str) -> Finding:
    """`shift` tokens late (positive) or early. One late is l[t] for l[t+1]: it only loses rows."""
    side = "late" if shift > 0 else "early"
    return Finding(
        code="mask_shift",
        severity="warning" if shift == 1 else "error",
        where=where,
        expected="the first marked token is the answer's first",
        found=f"{abs(shift)} {side} in {count} of {of} samples",
        fix=f"mask[t] = old[t{shift:+d}]: mark the answer's own tokens, its end included",
        message="The first draft of every answer is never trained, and that is the one every round begins with."
        if shift > 0
        else "Rows are trained to predict the prompt's own tokens, which serving never drafts.",
    )


# Taps -------------------------------------------------------------------------------------------------------------


def check_taps(given: Given) -> Check:
    """Each captured block is the boundary the manifest says, by numbers."""
    name = "tap identity"
    if given.reference is None or given.captures is None:
        return Check(name, "skipped", "needs captures and their target")
    samples = given.probe()
    if not samples:
        return Check(name, "skipped", NO_PROBE)
    declared = given.captures.boundaries
    n, up_to = num_hidden_layers(given.reference), None
    if given.target is None:  # streamed: once, and no further than it must
        samples, up_to = samples[:1], max(declared)
    result = Check(name, "pass", "")
    lines: list[str] = []
    for sample in samples:
        reference = given.boundaries(sample, up_to)
        normed = final_normed(given.reference, reference[-1]) if len(reference) > n else None
        matches = identify_taps(sample.taps_TA, reference, normed)
        lines += [f"declared {boundary}: {match.words()}" for boundary, match in zip(declared, matches, strict=True)]
        result.blocks = result.blocks or list(zip(declared, matches, strict=True))
        seen = {(finding.code, finding.expected, finding.found) for finding in result.findings}
        found = tap_findings(matches, declared, n)
        result.findings += [one for one in found if (one.code, one.expected, one.found) not in seen]
        if not all(match.known for match in matches):
            result.status = "unknown"
    if result.findings:
        result.status = "fail"
    result.evidence = "; ".join(lines)
    result.facts["blocks"] = block_facts(result.blocks)
    return result


# Teacher ----------------------------------------------------------------------------------------------------------


def check_teacher(given: Given) -> Check:
    """The stored last hidden gives the target's own next tokens under its declared norm state."""
    name = "teacher"
    if given.reference is None or given.captures is None:
        return Check(name, "skipped", "needs captures and their target")
    samples = given.probe()
    if not samples:
        return Check(name, "skipped", NO_PROBE)
    if given.target is None:
        return check_streamed_teacher(given, given.captures, samples)
    declared = given.captures.last_hidden_norm
    totals = {"before": 0.0, "after": 0.0, "normed twice": 0.0}
    references = [given.boundaries(sample)[-1] for sample in samples]
    for sample, last in zip(samples, references, strict=True):
        for reading, nats in teacher_divergence(given.target, sample.last_hidden_TH, last).items():
            totals[reading] += nats / len(samples)
    shown = norm_state(totals, declared)
    evidence = f"declared {declared} the final norm; nats a token from the target's own, read as {words(totals)}"
    if shown == declared:
        return Check(name, "pass", evidence)
    shifts = {
        agreeing_shift(given.target, sample.last_hidden_TH, last, declared)
        for sample, last in zip(samples, references, strict=True)
    }
    if len(shifts) == 1 and (shift := shifts.pop()) is not None:
        return Check(name, "fail", evidence, [shift_finding((), shift, (), "captures: last_hidden")])
    expected = f"states from {declared} the final norm: {NEAR} nats or less from the target's own"
    return Check(name, "fail", evidence, [teacher_finding(declared, shown, totals, expected)])


def check_streamed_teacher(given: Given, captures: CaptureReader, samples: Sequence[Sample]) -> Check:
    """A target larger than memory: its head and final norm alone, held to the tokens that it did say next.

    Boundary n of the reference would cost reading every layer. Under a wrong norm state the captured answers become
    unlikely by nats, as any text of the target's own does.
    """
    name, ends, declared = "teacher", given.ends(), captures.last_hidden_norm
    assert ends is not None, "a target that is streamed"
    totals, agreed = next_token_nats(ends, samples)
    if totals is None:
        return Check(name, "skipped", "no answer among the captured samples looked at")
    evidence = (
        f"declared {declared} the final norm; nats an answer's token, read as {words(totals)}; its own argmax in "
        f"{agreed[declared]:.0%} of them (streamed: final norm and head only)"
    )
    shown, sure = reading_shown(totals, agreed, declared, captures.greedy)
    if not sure:
        return Check(name, "unknown", f"{evidence}; these answers are not the target's own, and show nothing")
    if shown == declared:
        return Check(name, "pass", evidence)
    expected = f"states from {declared} the final norm, under which the answers are likeliest"
    known = shown if shown in ("before", "after") else None
    return Check(name, "fail", evidence, [teacher_finding(declared, known, totals, expected)])


def words(totals: dict[str, float]) -> str:
    return ", ".join(f"{reading} {nats:.3f}" for reading, nats in totals.items())


def teacher_finding(declared: str, shown: str | None, totals: dict[str, float], expected: str) -> Finding:
    """Stored states that are not what they are declared; `shown`: the norm state by the numbers, where they show one.

    Where they show none, the states are this target's from afar (another quantisation), or another's.
    """
    nearby = min(totals, key=lambda reading: totals[reading]) == declared and totals[declared] < NEARBY
    if shown:
        code = "teacher_not_normed" if declared == "after" else "teacher_double_normed"
        found, fix = f"; read as {shown} it: {totals[shown]:.3f}", f"record last_hidden_norm = {shown}"
        message = "Trained on this teacher, the loss converges as usual and acceptance falls."
    else:
        code = "quantization_mismatch" if nearby else "target_revision"
        found, fix = "", "capture again from the target, weights and precision that will be served"
        message = "No norm state explains these states: they are not of this target as it is given."
    return Finding(
        code=code,
        severity="error",
        where="captures: last_hidden",
        expected=expected,
        found=f"{totals[declared]:.2f} nats{found}",
        fix=fix,
        message=message,
    )
