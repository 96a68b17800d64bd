"""Are a checkpoint's numbers numbers? Read in pieces, without torch or numpy: an install without them looks too.

One NaN in a draft makes every drafted token wrong, and nothing says so: the server is healthy, the text is right, and
nothing is ever accepted.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path

from eyas.formats.headers import BITS, TensorHeader
from eyas.formats.problem import Problem

ALL_ONES = {
    "F64": 0x7FF0_0000_0000_0000,
    "F32": 0x7F80_0000,
    "BF16": 0x7F80,
    "F16": 0x7C00,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,
}
"""By dtype the bits that are all set in NaN and infinity alone: the exponent's (IEEE 754); of E4M3, which has no
infinity, the mantissa's too (OCP 8-bit floating point, 1.0). Never the sign's, the topmost."""
PIECE = 2**14
"""Bytes looked at in one sum: more leave the processor's nearest cache."""
SHOWN = 4


def not_finite(folder: Path, headers: Mapping[str, TensorHeader]) -> dict[str, int]:
    """Values that are NaN or infinite, by tensor of `folder`; tensors without any are left out."""
    counts = {
        name: _count(folder / header.file, header) for name, header in headers.items() if header.dtype in ALL_ONES
    }
    return {name: count for name, count in counts.items() if count}


def value_problems(folder: Path, headers: Mapping[str, TensorHeader]) -> list[Problem]:
    """One problem that names the tensors, or none."""
    counts = not_finite(folder, headers)
    if not counts:
        return []
    named = ", ".join(f"{count:,} of {prod(headers[name].shape or ()):,} in {name}" for name, count in _first(counts))
    more = f" and {len(counts) - SHOWN} tensors more" if len(counts) > SHOWN else ""
    return [
        Problem(
            "tensor_not_finite",
            where=next(iter(counts)),
            expected="finite numbers",
            found=f"NaN or infinity: {named}{more}",
            fix="take an earlier step of the training, or copy the file again",
        )
    ]


def _first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return list(counts.items())[:SHOWN]


def _count(path: Path, header: TensorHeader) -> int:
    assert header.shape is not None and header.dtype is not None, f"{path} was read from a file"
    width = BITS[header.dtype] // 8
    left, found, ones = prod(header.shape) * width, 0, ALL_ONES[header.dtype].to_bytes(width, "little")
    with path.open("rb") as file:
        file.seek(header.offset)
        while left > 0:
            piece = file.read(min(PIECE, left))
            found += _lanes_of_ones(piece, ones)
            left -= len(piece)
    return found


def _lanes_of_ones(data: bytes, ones: bytes) -> int:
    """Numbers in `data`, each as wide as `ones`, whose bits under it are all set: one sum over all of them.

    What is missing of `ones` is 0 exactly there, and at most half a lane's range; so adding that range less one carries
    into a lane's topmost bit wherever something is missing, and never beyond it.
    """
    count = len(data) // len(ones)
    mask, most, top = _lanes(count, ones)
    missing = (int.from_bytes(data, "little") & mask) ^ mask
    return count - ((missing + most) & top).bit_count()


@lru_cache(maxsize=16)
def _lanes(count: int, ones: bytes) -> tuple[int, int, int]:
    """`count` times `ones`, a lane's largest number without its topmost bit, and that bit."""
    rest = len(ones) - 1
    lanes = (ones, b"\xff" * rest + b"\x7f", b"\x00" * rest + b"\x80")
    mask, most, top = (int.from_bytes(lane * count, "little") for lane in lanes)
    return mask, most, top
