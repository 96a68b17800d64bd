"""Is the draft what it says it is? Both its forwards, its vocabulary, wiring and export, and what the engine accepts.

Shapes: T tokens, K different ones.
"""

import torch
from torch import nn

from eyas.data.shards import Sample
from eyas.errors import InputError
from eyas.models.checkpoint import has_info, load_draft
from eyas.models.draft import Draft, ParallelDraft
from eyas.models.vocab import check_vocab
from eyas.stage import chosen_step
from eyas.wiring.findings import Finding
from eyas.wiring.given import NO_PROBE, Given
from eyas.wiring.hypotheses.run import NAME as HYPOTHESES
from eyas.wiring.hypotheses.run import check_hypotheses
from eyas.wiring.parity import ttt_equals_incremental
from eyas.wiring.served import ALLOWED, walk_against_engine
from eyas.wiring.static_checks import Check, check_tables, check_values

PARITY_TOLERANCE = 1e-4
"""Float32 sums in another order, relative to the logits' own scale."""
PARITY_ROWS = 128
"""Tokens of a sample that are decoded one by one: a few seconds of the default target's draft."""
SERVED_STEPS, SERVED_TOKENS, SERVED_LENGTH = 3, 288, 96
"""Chain length, answer tokens and the most of one answer in the engine's own run, which is half of a check's time. Two
parts that feed a draft differently part within a few rounds."""
LARGER = "needs the whole target in memory; it is larger, and streaming gives states, not a decoder"


def check_parity(given: Given) -> Check:
    """The TTT training forward equals incremental decoding with a cache, on captured rows."""
    name = "TTT parity"
    if given.draft_folder is None or given.captures is None or given.reference is None:
        return Check(name, "skipped", "needs a draft, captures and the target")
    draft = given.bare_draft()
    if draft is None:
        return Check(name, "skipped", "a draft made elsewhere takes its shape from a target in memory; this is larger")
    samples = given.probe()
    if not samples:
        return Check(name, "skipped", NO_PROBE)
    difference = max(parity_of(given, draft, sample.cut(PARITY_ROWS)) for sample in samples)
    evidence = f"largest relative difference of logits {difference:.1e} (allowed {PARITY_TOLERANCE:.0e})"
    if difference <= PARITY_TOLERANCE:
        return Check(name, "pass", evidence)
    finding = Finding(
        code="parity_mismatch",
        severity="error",
        where="draft",
        expected=f"training and cached decoding equal within {PARITY_TOLERANCE:.0e}",
        found=f"{difference:.1e}",
        fix="report this with the draft's config.json: one of the two attention paths is wrong",
        message="What was trained is not what will be served.",
    )
    return Check(name, "fail", evidence, [finding])


def parity_of(given: Given, draft: Draft, sample: Sample) -> float:
    """Of a streamed target only the rows of the embedding that the sample's tokens need are read."""
    ids_T, ends = sample.ids_T, given.ends()
    if ends is not None and not draft.config.own_embedding:
        placeholder = [draft.mask_token_id] if isinstance(draft, ParallelDraft) else []
        ids_K, places = torch.cat([ids_T, ids_T.new_tensor(placeholder)]).unique(return_inverse=True)
        rows_KH = ends.embedding_rows(ids_K.tolist()).to(draft.fc.weight.dtype)
        draft.embed_tokens = nn.Embedding.from_pretrained(rows_KH)
        ids_T = places[: len(ids_T)]
        if isinstance(draft, ParallelDraft):
            draft.mask_token_id = int(places[-1])
    return ttt_equals_incremental(draft, sample.taps_TA.float(), ids_T)


def check_vocabulary(given: Given) -> Check:
    """d2t and t2d describe one injective, sorted map into the target's vocabulary that keeps the stop tokens."""
    name = "vocabulary"
    if given.draft_folder is not None:
        tables = check_tables(chosen_step(given.draft_folder))
        if tables.status == "fail" or given.reference is None:
            return tables
    draft = None if given.draft_folder is None or given.reference is None else given.bare_draft()
    if draft is None:
        return Check(name, "skipped", "needs a draft and its target")
    if not draft.config.reduced_vocabulary:
        return Check(name, "pass", "the draft has the target's whole vocabulary")
    try:
        check_vocab(draft.d2t, draft.t2d)
    except InputError as error:
        finding = Finding(
            code="d2t_out_of_range",
            severity="error",
            where=error.where,
            expected=error.wanted,
            found=error.got,
            fix=error.next,
            message="Drafted ids map to the wrong tokens: text stays right, acceptance is near zero.",
        )
        return Check(name, "fail", str(error), [finding])
    stops = given.stop_ids()
    lost = [stop for stop in stops if not draft.t2d[stop]]
    evidence = f"{draft.config.draft_vocab_size} of {draft.config.vocab_size} tokens; stop ids {stops}"
    if not lost:
        return Check(name, "pass", evidence)
    finding = Finding(
        code="vocab_mismatch",
        severity="warning",
        where="draft: t2d",
        expected=f"stop ids {lost} in the draft vocabulary",
        found="left out",
        fix="train again: the vocabulary always keeps the stop ids",
        message="The end of an answer can never be drafted.",
    )
    return Check(name, "pass", evidence, [finding])


def check_numbers(given: Given) -> Check:
    """Every weight of the draft, and of its export, is a finite number."""
    folders = [chosen_step(path) for path in (given.draft_folder, given.export_folder) if path is not None]
    checks = [check_values(folder) for folder in folders]
    told = [one for one in checks if one.status == "fail"] or checks
    return told[0] if told else Check("values", "skipped", "needs a draft")


def check_export(given: Given) -> Check:
    """The exported folder loads back to the draft's own wiring and tensors, bit for bit. No target is needed."""
    name = "export"
    if given.draft_folder is None or given.export_folder is None:
        return Check(name, "skipped", "needs a draft and its export")
    draft = given.bare_draft()
    if draft is None or not has_info(given.export_folder):
        return Check(name, "skipped", "a draft or export made elsewhere needs the target to be read (--target)")
    exported = load_draft(given.export_folder)[0]
    ours, theirs = draft.state_dict(), exported.state_dict()
    shared = set() if draft.config.own_embedding else {"embed_tokens.weight"}
    names = sorted((ours.keys() | theirs.keys()) - shared)
    differing = [key for key in names if key not in ours or key not in theirs or not same(ours[key], theirs[key])]
    mine, other = draft.config.model_dump(), exported.config.model_dump()
    differing += [f"config: {key} = {other[key]!r}, not {mine[key]!r}" for key in mine if mine[key] != other[key]]
    if not differing:
        return Check(name, "pass", f"{len(names)} tensors equal, config equal")
    finding = Finding(
        code="parity_mismatch",
        severity="error",
        where=str(given.export_folder),
        expected="the draft's own tensors and wiring",
        found=f"{len(differing)} differ: {', '.join(differing[:4])}",
        fix="eyas export again from this draft",
        message="What would be served is not the draft that was checked.",
    )
    return Check(name, "fail", f"{len(differing)} of {len(names)} tensors and keys differ", [finding])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, the dtype aside: an export may be stored in another."""
    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))


def check_served(given: Given) -> Check:
    """The engine accepts, on captured prompts, what the evaluator's walk says it will."""
    name = "acceptance"
    if given.draft_folder is not None and given.captures is not None and given.target is None and given.reference:
        return Check(name, "skipped", LARGER)
    draft = given.draft()
    if draft is None or given.captures is None or given.target is None:
        return Check(name, "skipped", "needs a draft, greedy captures and the target")
    if not given.captures.greedy:
        return Check(name, "skipped", "the walk needs greedy answers; these were sampled")
    served = walk_against_engine(
        given.target, draft, given.captures, num_steps=SERVED_STEPS, tokens=SERVED_TOKENS, length=SERVED_LENGTH
    )
    if served is None:
        return Check(name, "skipped", "no held-out answer with a round to count")
    evidence = (
        f"accept length {served.engine:.3f} in the engine, {served.walk:.3f} by the walk, over {served.samples} "
        f"held-out answers at chains of {served.num_steps}; {served.texts_equal} of them repeated token for token"
    )
    if served.texts_equal < served.samples:
        evidence += ", the engine's own text walked where it is another"
    if served.difference <= ALLOWED:
        return Check(name, "pass", evidence, facts=served.as_dict)
    finding = Finding(
        code="parity_mismatch",
        severity="error",
        where="the embedded engine",
        expected=f"accept length {served.walk:.3f} within {ALLOWED:.0%}",
        found=f"{served.engine:.3f}",
        fix="capture again from this target; if it stays, report it with the draft's config.json",
        message="The engine feeds its draft something else than it was trained on.",
    )
    return Check(name, "fail", evidence, [finding], served.as_dict)


def check_wirings(given: Given) -> Check:
    """The draft reads the captured rows best under the wiring it declares."""
    if given.draft_folder is not None and given.captures is not None and given.target is None and given.reference:
        return Check(HYPOTHESES, "skipped", LARGER)
    if given.target is None or given.captures is None or given.draft_folder is None:
        return Check(HYPOTHESES, "skipped", "needs a draft, captures and the target")
    return check_hypotheses(given.target, given.draft_folder, given.captures)
