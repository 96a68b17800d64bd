"""Names, shapes and dtypes of a safetensors checkpoint, from headers alone: no torch, no tensor read.

A file is 8 bytes of header length (little endian), a JSON header, and the data (safetensors README). Every range is
checked against the file's size, so a truncated download is found here and not at start-up.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import InputError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a header declares it. `dtype` is None where only a name and shape list was given."""

    shape: tuple[int, ...] | None
    dtype: str | None
    file: str
    offset: int = 0
    """The byte of `file` where its data begins."""


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Headers of one file, of a folder's `model.safetensors`, or of all shards of its index.

    Raises InputError for a missing, truncated or corrupt file and for an index that names what is not there.
    """
    if path.is_dir():
        index = path / INDEX
        return _read_shards(index) if index.is_file() else read_file(path / WEIGHTS)
    return _read_shards(path) if path.name.endswith(".index.json") else read_file(path)


def read_file(path: Path) -> dict[str, TensorHeader]:
    """Headers of one safetensors file. Raises InputError as `read_headers` does."""
    if not path.is_file():
        raise _bad(path, "no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _bad(path, f"{size} bytes, too few for a header")
        (length,) = struct.unpack("<Q", start)
        if length > min(LONGEST_HEADER, size - 8):
            raise _bad(path, f"a header of {length} bytes in a file of {size}: truncated, or not safetensors")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _bad(path, "a header that is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}


def read_tensor_bytes(path: Path, name: str, header: TensorHeader) -> bytes:
    """The bytes of one small tensor, of a file, or of the folder or index it was found through."""
    assert header.shape is not None and header.dtype is not None, f"{name} was read from a file"
    folder = path if path.is_dir() else path.parent
    with (folder / header.file).open("rb") as file:
        file.seek(header.offset)
        return file.read(math.prod(header.shape) * BITS[header.dtype] // 8)


def _tensor(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorHeader:
    try:
        shape, dtype, (begin, end) = tuple(entry["shape"]), entry["dtype"], entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        expected = math.prod(shape) * BITS[dtype] if whole else -1
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(path, f"a broken entry for {name!r} ({type(error).__name__}: {error})") from error
    if not whole or begin > end or (end - begin) * 8 != expected:
        raise _bad(path, f"{name!r}: {dtype} {list(shape)} does not fill bytes {begin}..{end}")
    if data_start + end > size:
        raise _bad(path, f"{name!r} ends at byte {data_start + end} of {size}: the file is truncated")
    return TensorHeader(shape, dtype, path.name, data_start + begin)


def _read_shards(index: Path) -> dict[str, TensorHeader]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted({str(file) for file in weight_map.values()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _bad(index, f"an index without a readable weight_map ({type(error).__name__})") from error
    headers = {name: tensor for file in files for name, tensor in read_file(index.parent / file).items()}
    absent = sorted(weight_map.keys() - headers.keys())
    if absent:
        raise _bad(index, f"{len(absent)} tensors that no shard holds: {', '.join(absent[:4])}")
    return headers


def _bad(path: Path, got: str) -> InputError:
    return InputError(wanted="a whole safetensors file", got=got, where=str(path), next="copy or download it again")
