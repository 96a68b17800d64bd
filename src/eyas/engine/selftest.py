"""Does a row get the same bits whichever forward computes it? Found out on the real modules, at start.

Kernels of one and of several rows sum in different orders on some machines and precisions (docs/engine.md), and then
plain decoding and verification part at near ties. A fixed row bucket cures it where the kernels are at least blind to a
row's place in it.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.engine.forward import Forward
from eyas.models.target import Target


def rows_are_invariant(forward: Forward, count: int, start: int) -> bool:
    """Whether logits and taps of `count` rows from `start` are bit-equal for every grouping tried.

    The cache must hold the rows before `start`. Singles are compared with forwards of 2..count rows from the first,
    and with those of 1..count that end at the last.
    """
    ids = _ids(count, forward.target.vocab_size, seed=1)
    singles = [_rows(forward, ids[i : i + 1], start + i)[0] for i in range(count)]
    if count > 2 and not _tree_is_invariant(forward, ids, start, singles):
        return False
    groups = [(0, end) for end in range(2, count + 1)] + [(first, count) for first in range(1, count)]
    return all(
        torch.equal(row, singles[first + offset])
        for first, end in groups
        for offset, row in enumerate(_rows(forward, ids[first:end], start + first))
    )


def check_rows(forward: Forward, count: int, *, borders: bool = True) -> bool:
    """`rows_are_invariant` early in a sequence, where rows lie on both sides of a length border, and beyond it.

    `borders` False: of a forward that attends over as many rows as there are, and so has none.
    """
    border = forward.cache.block
    starts = [8] if borders else [8, 45]
    if borders and border + 3 * count <= forward.target.context_length:
        starts += [border - max(1, count // 2), border + count]
    forward.cache.reserve(border + 3 * count)
    forward.prefill(_ids(starts[-1], forward.target.vocab_size, seed=0))
    return all(rows_are_invariant(forward, count, start) for start in reversed(starts))


OWN_ROWS, OWN_PROMPT, OWN_ERROR = 16, 12, 0.1
"""Rows compared with the target's own, how many of them are a prompt, and how far the middle one may be off (a state
lost or an attention misread was off by 0.3 to 1.6, bfloat16 over 30 layers by 0.015)."""


def own_states(target: Target) -> Tensor:
    """Final-normed states [R, H] of OWN_ROWS rows by the target's own forward, attention and all.

    Raises InputError for a target without a context length.
    """
    assert target.context_length > OWN_ROWS, "a context holds the self-test"
    ids = torch.tensor([_ids(OWN_ROWS, target.vocab_size, seed=2)], device=target.model.device)
    return target.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]


def error_of(forward: Forward, own_RH: Tensor) -> float:
    """How far `forward`'s rows behind a cached prompt are from the target's own, relative, in the middle.

    Bits that agree among the engine's own forwards prove nothing about layers that keep a state beside their keys and
    values, or that ask more of attention than they say.
    """
    ids = _ids(OWN_ROWS, forward.target.vocab_size, seed=2)
    forward.cache.reserve(OWN_ROWS)
    forward.prefill(ids[:OWN_PROMPT])
    rows = []
    for at in range(OWN_PROMPT, OWN_ROWS):  # one by one: within a forward a state is carried from row to row
        if forward.rolls_back:
            forward.verify([(ids[at] + 1) % forward.target.vocab_size], at)  # a wrong row, overwritten by the right one
        rows.append(forward.verify(ids[at : at + 1], at)[0, 0])
    rows_RH = torch.stack(rows).float()
    expected_RH = own_RH[OWN_PROMPT:].float()
    off = (rows_RH - expected_RH).norm(dim=-1) / expected_RH.norm(dim=-1)
    return float(off.median())


def _tree_is_invariant(forward: Forward, ids: Sequence[int], start: int, singles: Sequence[Tensor]) -> bool:
    """A tree of a wrong row and the chain of `ids` beside it: the chain's rows are those of single forwards.

    The kept path leaves the cache as the singles left it, which the groupings tried next would show.
    """
    parents = [-1, 0, 0, *range(2, len(ids) - 1)]
    wrong = (ids[1] + 1) % forward.target.vocab_size
    path = [0, *range(2, len(ids))]
    rows = _rows(forward, [ids[0], wrong, *ids[1:-1]], start, parents)
    forward.keep(path)
    return all(torch.equal(rows[row], singles[offset]) for offset, row in enumerate(path))


def _rows(forward: Forward, ids: Sequence[int], start: int, parents: Sequence[int] | None = None) -> list[Tensor]:
    """Logits and taps of each of `ids`, joined."""
    logits = forward.logits(forward.verify(ids, start, parents))
    parts = torch.cat([logits, forward.taps()[0].float()], dim=-1) if forward.boundaries else logits
    return list(parts[: len(ids)])


def _ids(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
