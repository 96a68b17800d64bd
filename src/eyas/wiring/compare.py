"""Traces and foreign dumps, held against the reference, captures, another trace, and the draft's own weights.

Everything is by numbers: a block is the boundary it measures as, whatever the file says; ids are where they match; what
the engine computed is what the draft's folder computes on the same rows.

Shapes: T tokens, H hidden, A width of the concatenated taps, R rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyas.data.foreign import Dump, dumps_of_trace, read_dumps
from eyas.data.shards import CaptureReader, Sample
from eyas.errors import InputError, Unsupported
from eyas.formats.problem import Problem
from eyas.formats.trace import TRACE, Record, Trace, is_trace, read_trace
from eyas.models.target import Target
from eyas.run import is_complete, read_manifest
from eyas.stage import check_file
from eyas.wiring.findings import Finding, finding
from eyas.wiring.identify import NORMED, Match, Reference, block_facts, identify_in, name_of
from eyas.wiring.reference import final_normed, num_hidden_layers, reference_boundaries
from eyas.wiring.static_checks import Check
from eyas.wiring.tap_findings import tap_findings

FEWEST, PROBE, TEXTS = 16, 256, 2
"""Rows a text must have, rows of it that are looked at, and texts that are."""
SAME, OTHER = 0.03, 0.1
"""Median relative distance of rows up to which captured and traced states are the same (half precision and fused
kernels move them by a per cent or so), and from which they are not. Between, only the reference can tell."""


@dataclass(frozen=True)
class Traced:
    """What `--trace` named, read: texts, and the trace they come from if it is one."""

    path: Path
    dumps: list[Dump]
    trace: Trace | None

    @classmethod
    def read(cls, path: Path) -> "Traced":
        """Raises InputError for what is no trace and no dump. A trace of statistics only has no texts."""
        if not is_trace(path):
            return cls(path, read_dumps(path), None)
        trace = read_trace(path)
        stored = any(record.tensor for record in trace.of("tap") + trace.of("taps"))
        return cls(path, dumps_of_trace(trace) if stored else [], trace)

    @property
    def texts(self) -> list[Dump]:
        """The longest texts that are long enough, cut to the probe's length."""
        long = sorted((dump for dump in self.dumps if len(dump.ids) >= FEWEST), key=lambda dump: -len(dump.ids))
        return [dump.cut(PROBE) for dump in long[:TEXTS]]

    @property
    def where(self) -> str:
        return f"{self.path}: {self.dumps[0].source}" if self.dumps else str(self.path)

    def too_little(self) -> str:
        """Why there is no text to look at."""
        if not self.dumps:
            return "statistics only: trace again with tensors (--tensors, in an engine EYAS_TRACE_TENSORS=1)"
        return f"no text of {FEWEST} tokens or more: send a longer prompt"


def check_lines_of(traced: Traced) -> list[Check]:
    """The lines of a trace that ended well are those it ended with; of one that an engine left, nothing tells."""
    if traced.trace is None or not is_complete(traced.path):
        return []
    name = f"trace lines ({traced.path.name})"
    try:
        check_file(traced.path, TRACE, read_manifest(traced.path, "trace"))
    except InputError as error:
        cut = Problem("data_corrupt", where=error.where, expected=error.wanted, found=error.got, fix=error.next)
        return [Check(name, "fail", f"{TRACE}: {error.got}", [finding(cut)])]
    return [Check(name, "pass", "their checksum is the manifest's")]


def check_taps_of(
    traced: Traced, target: Target | Path | None, declared: Sequence[int] | None, device: torch.device | str = "cpu"
) -> Check:
    """Which boundary each block is. `declared` is what the draft was trained on; else what the writer says."""
    name = f"trace taps ({traced.path.name})"
    if target is None:
        return Check(name, "skipped", "needs the target (--target)")
    if not traced.texts:
        return Check(name, "skipped", traced.too_little())
    n = num_hidden_layers(target)
    # A streamed target is run once and no further than it must be.
    streamed = isinstance(target, Path)
    up_to = max(declared) if streamed and declared else None
    result = Check(name, "pass", "")
    lines = []
    for dump in traced.texts[: 1 if streamed else TEXTS]:
        try:
            states = reference_boundaries(target, list(dump.ids), up_to, device)
        except Unsupported as error:
            return Check(name, "skipped", f"the target cannot be read: {error.got} ({error.where})")
        whole = len(states) > n
        reference = Reference.of(states, final_normed(target, states[-1]) if whole else None)
        matches = [identify_in(block, reference) for block in dump.blocks(states[0].shape[-1])]
        wanted = tuple(declared or dump.declared or ())
        lines += [f"{word}: {match.words()}" for word, match in zip(labels(matches, wanted), matches, strict=True)]
        told = wanted if len(wanted) == len(matches) else [None] * len(matches)
        result.blocks = result.blocks or list(zip(told, matches, strict=True))
        add(result, judge_blocks(matches, wanted, n, traced.where))
        if dump.last_hidden_TH is not None and whole:
            last = identify_in(dump.last_hidden_TH, reference)
            lines.append(f"last hidden: {last.words()}")
            add(result, judge_last(last, dump, n, traced.where))
        if not wanted or not all(match.known for match in matches):
            result.status = "unknown"
    if result.findings:
        result.status = "fail"
    result.evidence = "; ".join(dict.fromkeys(lines))
    result.facts["blocks"] = block_facts(result.blocks)
    return result


def add(result: Check, found: Sequence[Finding]) -> None:
    """Findings that are not there yet."""
    known = {(one.code, one.expected, one.found) for one in result.findings}
    result.findings += [one for one in found if (one.code, one.expected, one.found) not in known]


def labels(matches: Sequence[Match], declared: Sequence[int]) -> list[str]:
    if len(declared) != len(matches):
        return [f"block {index}" for index in range(len(matches))]
    return [f"declared {boundary}" for boundary in declared]


def judge_blocks(matches: Sequence[Match], declared: Sequence[int], n: int, where: str) -> list[Finding]:
    """Findings of identified blocks; none where nothing is declared."""
    if not declared:
        return []
    if len(matches) != len(declared):
        found = ", ".join(match.words() for match in matches)
        return [
            Finding(
                code="tap_missing",
                severity="error",
                where=where,
                expected=f"{len(declared)} states, boundaries {list(declared)}",
                found=f"{len(matches)}: {found}",
                fix=f"make the engine capture boundaries {list(declared)}: eyas export writes the ids it needs",
                message="fc is fed states that are not there, or others in their place.",
            )
        ]
    advice = f"make the engine capture boundaries {list(declared)}: eyas export writes the ids each engine needs"
    return [one.model_copy(update={"fix": advice}) for one in tap_findings(matches, declared, n, where)]


def judge_last(match: Match, dump: Dump, n: int, where: str) -> list[Finding]:
    """The last hidden state must be boundary n, before or after the final norm, and as declared where it is."""
    known = {n: "before", NORMED: "after"}
    shown = None if match.boundary is None else known.get(match.boundary)
    if match.boundary is None or (shown is not None and dump.last_hidden_norm in (None, shown) and not match.shift):
        return []
    if shown is None or match.shift:
        code, expected = "token_shift" if match.shift else "tap_offset", f"boundary {n} of {n}, row t of token t"
        fix = "dump the last layer's output of the same rows as the taps"
    else:
        code = "teacher_double_normed" if shown == "after" else "teacher_not_normed"
        expected = f"states from {dump.last_hidden_norm} the final norm"
        fix = f"declare last_hidden_norm = {shown}"
    return [
        Finding(
            code=code,
            severity="error",
            where=f"{where}: last hidden",
            expected=expected,
            found=name_of(match.boundary),
            fix=fix,
            message=f"A teacher made from it is another model's: {match.words()}.",
        )
    ]


# Captures -----------------------------------------------------------------------------------------------------------


def check_captures_of(traced: Traced, captures: CaptureReader | None) -> Check:
    """The same tokens' states in trace and captures are the same."""
    name = f"trace and captures ({traced.path.name})"
    if captures is None:
        return Check(name, "skipped", "needs captures (--captures)")
    if not traced.texts:
        return Check(name, "skipped", traced.too_little())
    pairs = [(dump, found) for dump in traced.texts if (found := same_text(dump, captures)) is not None]
    if not pairs:
        return Check(name, "skipped", "no captured sample has the tokens of a traced text: trace one of its prompts")
    result = Check(name, "pass", "")
    lines = []
    for dump, sample in pairs:
        theirs = list(sample.taps_TA.split(captures.hidden_size, dim=-1))
        table = distances(dump.blocks(captures.hidden_size), theirs)
        add(result, judge_captures(table, captures.boundaries, traced.where))
        lines.append(f"{sample.id}, {len(sample.ids_T)} tokens: {diagonal_words(table, captures.boundaries)}")
        if len(table) == len(theirs) and any(SAME < table[i][i] < OTHER for i in range(len(table))):
            result.status = "unknown"
    result.status = "fail" if result.findings else result.status
    result.evidence = "; ".join(lines)
    return result


def same_text(dump: Dump, captures: CaptureReader) -> Sample | None:
    """The captured sample that begins with the same tokens for the longest, cut to these rows; None below FEWEST."""
    best, rows = None, FEWEST - 1
    for number, entry in enumerate(captures.samples):
        if entry.length < FEWEST:
            continue
        ids = captures.ids(number)
        common = next((t for t, (a, b) in enumerate(zip(dump.ids, ids, strict=False)) if a != b), None)
        common = min(len(dump.ids), len(ids)) if common is None else common
        if common > rows:
            best, rows = number, common
        if common == len(dump.ids):
            break
    return None if best is None else captures.read(best).cut(rows)


def distances(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[list[float]]:
    """Median over rows of |x - y| / |y|, of each of my blocks to each of theirs."""
    return [[distance(x, y) for y in theirs] for x in mine]


def distance(x_TH: Tensor, y_TH: Tensor) -> float:
    """Median over the common rows of |x - y| / |y|; infinite where no row is finite."""
    rows = min(len(x_TH), len(y_TH))
    x, y = x_TH[:rows].float(), y_TH[:rows].float()
    ratios = (x - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(1e-12)
    kept = ratios[ratios.isfinite()]
    return kept.median().item() if len(kept) else float("inf")


def diagonal_words(table: Sequence[Sequence[float]], boundaries: Sequence[int]) -> str:
    if len(table) != len(boundaries):
        return f"{len(table)} states against {len(boundaries)}"
    return ", ".join(f"boundary {b} differs by {table[i][i]:.1%}" for i, b in enumerate(boundaries))


def judge_captures(table: Sequence[Sequence[float]], boundaries: Sequence[int], where: str) -> list[Finding]:
    """Order first: each block is another's twin. Else those that are no twin of their own."""
    fix = f"make the engine capture boundaries {list(boundaries)}, in this order, of the captures' own target"
    if len(table) != len(boundaries):
        expected, found = f"{len(boundaries)} states, as captured", f"{len(table)}"
        return [finding_of("tap_missing", where, expected, found, fix, "Training saw other states than serving has.")]
    nearest = [min(range(len(row)), key=row.__getitem__) for row in table]
    twins = all(table[i][j] <= SAME for i, j in enumerate(nearest))
    if twins and nearest != list(range(len(table))) and sorted(nearest) == list(range(len(table))):
        found = str([boundaries[j] for j in nearest])
        message = "The same states lie in another order: fc reads each through weights of its own."
        return [finding_of("tap_order", where, str(list(boundaries)), found, fix, message)]
    wrong = [(b, table[i][i]) for i, b in enumerate(boundaries) if table[i][i] >= OTHER]
    message = "Another boundary, another token, or another target's states: --target tells which."
    return [
        finding_of("tap_offset", where, f"boundary {b} as captured, within {SAME:.0%}", f"{d:.1%} away", fix, message)
        for b, d in wrong
    ]


def finding_of(code: str, where: str, expected: str, found: str, fix: str, message: str) -> Finding:
    return Finding(code=code, severity="error", where=where, expected=expected, found=found, fix=fix, message=message)


# Rows ---------------------------------------------------------------------------------------------------------------


def check_rows_of(traced: Traced) -> Check:
    """The draft embeds, beside the states of token t, token t + 1, at position t."""
    name = f"trace rows ({traced.path.name})"
    if traced.trace is None:
        return Check(name, "skipped", "needs a trace: dumps hold no draft")
    hits: dict[int, int] = dict.fromkeys(range(-1, 4), 0)
    rows = 0
    offsets: set[int] = set()
    tokens: dict[int, int] = {}
    for _, records in traced.trace.calls():
        found = known_tokens(records)
        tokens = found if 0 in found else tokens | found
        fed = next((one for one in records if one.stage == "taps" and one.positions), None)
        step = next((one for one in records if one.stage == "layer" and not one.step and one.ids), None)
        if fed is None or step is None or fed.positions is None or step.ids is None:
            continue
        if fed.positions[0] != 0:  # beside refused tokens lie the target's own: only a prompt's rows are plain
            continue
        if step.positions is not None and len(step.positions) == len(fed.positions):
            offsets |= {mine - theirs for mine, theirs in zip(step.positions, fed.positions, strict=True)}
        for position, embedded in list(zip(fed.positions, step.ids, strict=False))[:-1]:
            if all(position + shift in tokens for shift in hits):
                rows += 1
                for shift in hits:
                    hits[shift] += tokens[position + shift] == embedded
    return judge_rows(name, hits, rows, offsets, traced.where)


def known_tokens(records: Sequence[Record]) -> dict[int, int]:
    """Position to token, as far as a call's states say."""
    found: dict[int, int] = {}
    for record in records:
        if record.stage in ("tap", "taps", "embedding") and record.ids and record.positions:
            found |= dict(zip(record.positions, record.ids, strict=False))
    return found


def judge_rows(name: str, hits: dict[int, int], rows: int, offsets: set[int], where: str) -> Check:
    if rows < FEWEST // 2:
        return Check(name, "skipped", f"only {rows} rows whose neighbouring tokens the trace knows")
    best = max(hits, key=lambda shift: hits[shift])
    evidence = f"of {rows} rows {hits[1]} embed the next token; rotary position minus row: {sorted(offsets)}"
    result = Check(name, "pass", evidence)
    if hits[1] < 0.9 * rows:
        clear = hits[best] >= 0.9 * rows
        found = f"token t{best:+d}" if clear else f"token t+1 in {hits[1]} of {rows} rows"
        fix = "shift the ids left by one against the states, as SGLang and vLLM do"
        message = "A draft trained on (state t, token t + 1) is asked about another pair."
        result.findings.append(finding_of("token_shift", where, "token t+1 beside state t", found, fix, message))
    if len(offsets) > 1:
        fix = "give each row the position of its state's token"
        message = "Rotary distances between the draft's rows are not those of training."
        found = f"differences {sorted(offsets)}"
        result.findings.append(finding_of("position_shift", where, "one difference for all rows", found, fix, message))
    result.status = "fail" if result.findings else "pass"
    return result


def check_trace(
    traced: Traced,
    target: Target | Path | None,
    captures: CaptureReader | None,
    declared: Sequence[int] | None,
    device: torch.device | str = "cpu",
) -> list[Check]:
    """Every check of one trace or dump that needs no draft's weights.

    Captures tell only that states differ: where the target tells what they are, its findings stand alone.
    """
    taps, held = check_taps_of(traced, target, declared, device), check_captures_of(traced, captures)
    if taps.findings and held.findings:
        held.findings, held.evidence = [], f"{held.evidence}; what they are: {taps.name}"
    return [taps, held, check_rows_of(traced)]
