"""The wirings that are tried: the declared one, and every near-miss that people have met.

A wiring says how a draft's tensors and captured rows are put together. A near-miss differs from the declared wiring in
one way, carries the code of the finding it would be, and the line to change if the draft turns out to be made for it.
Those that need no target come first: of wirings that explain the rows equally well the first is named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Any, Literal

from eyas.formats.draft_config import DraftConfig
from eyas.formats.taps import IDS_KEY, default_boundaries, to_dialect
from eyas.wiring.identify import NORMED, name_of

Table = Literal["declared", "identity", "absolute", "mask"]
"""Which target id a draft id means: by d2t as stored, itself (no d2t), by d2t read as target ids, by t2d's order."""
Embedding = Literal["declared", "target", "stored", "scaled"]
"""As declared, the target's, the one among the draft's tensors, or the target's times sqrt(H)."""
Head = Literal["declared", "target", "embedding"]
"""The draft's own, the target's rows of the draft vocabulary, or the embedding's (`tie_word_embeddings`)."""
DECLARED = "as declared"
ANEW = "the declared taps, computed anew"
BASES = (10_000.0, 500_000.0, 1_000_000.0)
"""Rotary bases that trainers and targets use, or fall back to in silence."""
MOST_ORDERED = 3
"""Up to so many taps every order is tried; beyond, what a slip makes: neighbours swapped, rotated, reversed."""


@dataclass(frozen=True)
class Wiring:
    """One way to put draft and captured rows together; everything not said is as declared."""

    name: str
    code: str | None = None
    """The finding, where the draft was made for this wiring."""
    fix: str = ""
    where: str = "draft: config.json"
    order: tuple[int, ...] | None = None
    """The captured blocks, in this order."""
    blocks: tuple[int, ...] | None = None
    """These boundaries, computed anew by the target (NORMED: the last one after the final norm)."""
    hidden: int = 0
    """Row t holds the states of token t + hidden."""
    token: int = 0
    """Row t embeds token t + 1 + token."""
    position: int = 0
    """Row t is rotated as row t + position."""
    pace: int = 1
    """Rotary positions that a drafted token moves on."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the draft's config that differ."""
    table: Table = "declared"
    embedding: Embedding = "declared"
    head: Head = "declared"
    from_step: int = 0
    """The first step that can tell this wiring from the declared one."""


@dataclass(frozen=True)
class Facts:
    """What decides which near-misses exist: the draft's config, its tensors, and its target's rotary settings."""

    config: DraftConfig
    stored: frozenset[str]
    """Names of tensors in the checkpoint, used by the config or not."""
    target_rope_theta: float
    target_rope_scaling: Mapping[str, Any] | None
    blank_d2t: bool = False
    """Whether d2t is all zeros: written by a tool that had none, or filled in by an engine."""
    target_is_here: bool = True
    """Whether states can be computed anew."""
    tied_target: bool = False
    """Whether the target's head is its embedding."""
    embedding_scale: bool = False
    """Whether the target multiplies its embeddings (Gemma does, by sqrt(H))."""


def wirings(facts: Facts) -> list[Wiring]:
    """The declared wiring, then every near-miss of it, those of the target's states last."""
    found = [Wiring(DECLARED), *norms(facts), *tables(facts), *ends(facts), *ropes(facts), *shifts(), *orders(facts)]
    return found + list(taps(facts)) if facts.target_is_here else found


def norms(facts: Facts) -> Iterator[Wiring]:
    """Norms that a flag switches, as far as the tensors are there."""
    config = facts.config
    flip = not config.norm_before_residual
    words = "after hidden_norm" if flip else "before hidden_norm"
    yield Wiring(
        f"the residual {words}",
        "residual_norm",
        f"norm_before_residual: {str(flip).lower()}" + (" (SGLang cannot serve it)" if flip else ""),
        config={"norm_before_residual": flip},
    )
    if config.method == "eagle3":  # P-EAGLE feeds nothing back
        flip = not config.norm_output
        yield Wiring(
            f"the next step fed {'norm(h)' if flip else 'h before the norm'}",
            "feedback_norm",
            f"norm_output: {str(flip).lower()}",
            config={"norm_output": flip},
            from_step=1,
        )
    per_tap = {f"fc_norm.{index}.weight" for index in range(len(config.boundaries))} <= facts.stored
    whole = "input_norm.weight" in facts.stored
    readings = [("no norm before fc", False, False)]
    readings += [("one norm a tap before fc", True, False)] if per_tap else []
    readings += [("one norm over all taps before fc", False, True)] if whole or per_tap else []
    for name, fc_norm, norm_before_fc in readings:
        if (fc_norm, norm_before_fc) != (config.fc_norm, config.norm_before_fc):
            yield Wiring(
                name,
                "fc_norm",
                f"fc_norm: {str(fc_norm).lower()}, norm_before_fc: {str(norm_before_fc).lower()}",
                config={"fc_norm": fc_norm, "norm_before_fc": norm_before_fc},
            )


def tables(facts: Facts) -> Iterator[Wiring]:
    """What else the vocabulary tables may mean. No other reading where the vocabulary is whole."""
    if not facts.config.reduced_vocabulary:
        return
    where, missing = "draft: d2t", facts.blank_d2t or "d2t" not in facts.stored
    if not missing:
        fix = "d2t = d2t - arange(draft_vocab_size): it holds target ids, engines want offsets"
        yield Wiring("d2t as target ids", "d2t_absolute", fix, where, table="absolute")
        fix = "d2t = zeros: the head speaks the target's first ids"
        yield Wiring("no d2t", "d2t_out_of_range", fix, where, table="identity")
    if "t2d" in facts.stored:
        fix = "write d2t: the ids that t2d marks, minus arange(draft_vocab_size)"
        code = "d2t_missing" if missing else "d2t_out_of_range"
        yield Wiring("draft ids in the order of t2d", code, fix, where, table="mask")


def ends(facts: Facts) -> Iterator[Wiring]:
    """Whose embedding, and whose head."""
    where = "draft: embed_tokens"
    if facts.config.own_embedding:
        fix = "own_embedding: false, and leave embed_tokens out of the folder"
        yield Wiring("the target's embedding", "embed_mismatch", fix, where, embedding="target")
    elif "embed_tokens.weight" in facts.stored:
        fix = "own_embedding: true: the draft's embed_tokens is not the target's"
        yield Wiring("the stored embedding", "embed_mismatch", fix, where, embedding="stored")
    if facts.embedding_scale and not facts.config.own_embedding:
        fix = "store embed_tokens = the target's table times sqrt(hidden_size), own_embedding: true"
        yield Wiring("the target's embedding times sqrt(H)", "embed_mismatch", fix, where, embedding="scaled")
    if not facts.tied_target:
        fix = "tie_word_embeddings: true was trained; write lm_head from the embedding's rows"
        yield Wiring("the embedding as head", "tied_head", fix, "draft: lm_head", head="embedding")
    fix = "lm_head = the target's head rows of the draft vocabulary"
    yield Wiring("the target's head", "head_mismatch", fix, "draft: lm_head", head="target")


def ropes(facts: Facts) -> Iterator[Wiring]:
    """Rotary bases and scalings."""
    config = facts.config
    for theta in dict.fromkeys((facts.target_rope_theta, *BASES)):
        if theta != config.rope_theta:
            yield Wiring(f"rope base {theta:g}", "rope_theta", f"rope_theta: {theta:g}", config={"rope_theta": theta})
    scalings = [None, dict(facts.target_rope_scaling) if facts.target_rope_scaling else None]
    for scaling in [one for one in (scalings[0], scalings[1]) if one != config.rope_scaling][:2]:
        name = "no rope scaling" if scaling is None else "the target's rope scaling"
        if scaling is not None or config.rope_scaling is not None:
            yield Wiring(name, "rope_scaling", f"rope_scaling: {scaling or 'null'}", config={"rope_scaling": scaling})


def shifts() -> Iterator[Wiring]:
    """States, tokens or rotary positions against the rows."""
    for shift in (-1, 1):
        earlier = "one token earlier" if shift < 0 else "one token later"
        fix = f"pair row t with the states of token t{shift:+d}: {'drop' if shift > 0 else 'keep'} the first state"
        yield Wiring(f"states {earlier}", "token_shift", fix, "captures: taps", hidden=shift)
    for shift in (-1, 1):
        earlier = "one earlier" if shift < 0 else "one later"
        fix = f"row t embeds token t{1 + shift:+d}".replace("+0", "")
        yield Wiring(f"embedded token {earlier}", "token_shift", fix, "captures: input_ids", token=shift)
    # Labels that were not shifted at all would be the next state and token: but that shows the draft its answer.
    fix = "train again: row t's teacher is the target's distribution after token t+1; labels were shifted twice"
    yield Wiring("labels one token later", "token_shift", fix, "draft: training", hidden=-1, token=-1)
    fix = "rotate step s of row t at t, as trained, or train again: serving rotates at t + s"
    yield Wiring("later steps at the row's own position", "position_shift", fix, "draft: rope", pace=0, from_step=1)
    yield Wiring("every position one later", "position_shift", "none needed", "draft: rope", position=1)


def orders(facts: Facts) -> Iterator[Wiring]:
    """The captured blocks in another order."""
    count = len(facts.config.boundaries)
    straight = tuple(range(count))
    if count <= MOST_ORDERED:
        others = [order for order in permutations(straight) if order != straight]
    else:
        swaps = [(*straight[:i], i + 1, i, *straight[i + 2 :]) for i in range(count - 1)]
        others = list(dict.fromkeys([*swaps, (*straight[1:], 0), (count - 1, *straight[:-1]), straight[::-1]]))
    for order in others:
        named = [facts.config.boundaries[index] for index in order]
        yield Wiring(
            f"taps in the order {named}", "tap_order", f"concatenate the taps as {named}", "captures: taps", order=order
        )


def taps(facts: Facts) -> Iterator[Wiring]:
    """Other boundaries, computed anew; the declared ones too, as what these are compared with."""
    config = facts.config
    declared, n = config.boundaries, config.target_num_hidden_layers
    yield Wiring(ANEW, blocks=declared)
    if n in declared:
        normed = tuple(NORMED if boundary == n else boundary for boundary in declared)
        fix = f"capture boundary {n} before the final norm, and train again; or serve the normed state"
        yield Wiring("the last tap after the final norm", "tap_post_norm", fix, "captures: taps", blocks=normed)
    seen = {declared}
    for blocks in tap_lists(declared, n):
        if blocks not in seen and min(blocks) >= 0 and max(blocks) <= n and list(blocks) == sorted(set(blocks)):
            seen.add(blocks)
            code = "tap_embedding" if (0 in blocks) != (0 in declared) else "tap_offset"
            yield Wiring(f"taps {list(blocks)}", code, taps_line(blocks, n), blocks=blocks)


def tap_lists(declared: tuple[int, ...], n: int) -> Iterator[tuple[int, ...]]:
    """Lists that stand for the declared one by a slip: all moved, the embedding put first or left out, defaults."""
    yield tuple(boundary - 1 for boundary in declared)
    yield tuple(boundary + 1 for boundary in declared)
    yield (0, *declared[:-1])
    if declared[0] == 0 and len(declared) > 1:
        yield (*declared[1:], n - 3)
        yield (*declared[1:], n)
    if n >= 7:
        yield default_boundaries(n)
    for index, step in product(range(len(declared)), (-1, 1)):
        yield (*declared[:index], declared[index] + step, *declared[index + 1 :])


def taps_line(blocks: tuple[int, ...], n: int) -> str:
    """Boundaries as the lines that name them, in Eyas's and the engines' spellings."""
    outputs = to_dialect("specforge", blocks, n)
    return (
        f"boundaries: {list(blocks)}, capture again, export again ({IDS_KEY}: {list(blocks)} for vLLM, "
        f"eagle_config.{IDS_KEY}: {outputs} for SGLang's generic classes)"
    )


def blocks_words(blocks: tuple[int, ...]) -> str:
    return ", ".join(name_of(boundary) for boundary in blocks)
