"""d2t and t2d of a checkpoint, read and judged without torch: they are small, and wrong ones cost all acceptance.

`d2t` holds offsets (target id = draft id + d2t[draft id]), `t2d` is true exactly at those target ids. Sources as in
`models/vocab.py`, which judges the same of tensors in memory.
"""

from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from eyas.formats.headers import TensorHeader, read_tensor_bytes
from eyas.formats.problem import Problem

CODES = {"I64": "q", "I32": "i"}
"""Dtypes of d2t and their array type codes."""


def read_tables(path: Path, headers: Mapping[str, TensorHeader]) -> tuple[list[int] | None, bytes | None]:
    """(d2t, t2d as one byte a token) of a checkpoint; None for a table it lacks or of a dtype that is none."""
    d2t = t2d = None
    for name, header in headers.items():
        base = name.rsplit(".", 1)[-1]
        if base == "d2t" and header.dtype in CODES:
            d2t = array(CODES[header.dtype], read_tensor_bytes(path, name, header)).tolist()
        if base == "t2d" and header.dtype in ("BOOL", "U8", "I8"):
            t2d = read_tensor_bytes(path, name, header)
    return d2t, t2d


def judge_tables(d2t: Sequence[int], t2d: bytes | None, vocab_size: int | None) -> list[Problem]:
    """What is wrong with the tables of a reduced vocabulary of `len(d2t)` tokens."""
    size = len(d2t)
    total = vocab_size if vocab_size is not None else len(t2d) if t2d is not None else None
    ids = [index + offset for index, offset in enumerate(d2t)]
    first_ids = t2d is not None and all(t2d[:size]) and not any(t2d[size:])
    if total is not None and size < total and not any(d2t) and not first_ids:
        found = "all zero: draft ids pass for target ids, acceptance near zero"
        return [_problem("d2t_missing", "offsets of the tokens the head was trained for", found)]
    increasing = all(a < b for a, b in pairwise(ids))
    inside = bool(ids) and ids[0] >= 0 and (total is None or max(ids) < total)
    agrees = t2d is None or (inside and all(0 <= i < len(t2d) and t2d[i] for i in ids) and sum(map(bool, t2d)) == size)
    if increasing and inside and agrees:
        return []
    if _holds_ids(d2t, t2d, total):
        return [_problem("d2t_absolute", "offsets: target id minus draft id", f"target ids: {_shown(d2t)}")]
    if all(offset == index for index, offset in enumerate(d2t)):
        return [_problem("d2t_absolute", "offsets, all zero for an identity", "0, 1, 2, ...: they give 0, 2, 4, ...")]
    found = f"ids {_shown(ids)}" if not (increasing and inside) else "a t2d that is true elsewhere"
    limit = f"0..{total - 1}" if total is not None else "0.."
    return [_problem("d2t_out_of_range", f"i + d2t[i] strictly increasing within {limit}, true in t2d", found)]


def _holds_ids(d2t: Sequence[int], t2d: bytes | None, total: int | None) -> bool:
    """Whether the entries themselves are an increasing list of target ids."""
    if not all(a < b for a, b in pairwise(d2t)) or not d2t or d2t[0] < 0:
        return False
    if total is not None and d2t[-1] >= total:
        return False
    return t2d is None or all(index < len(t2d) and t2d[index] for index in d2t)


def _shown(ids: Sequence[int]) -> str:
    return f"{', '.join(map(str, ids[:4]))}{', ...' if len(ids) > 4 else ''}"


def _problem(code: str, expected: str, found: str) -> Problem:
    fix = "write d2t[i] = target id - i for the ids at which t2d is true, in order"
    return Problem(code, where="d2t", expected=expected, found=found, fix=fix)
