"""Tensors of a checkpoint, one at a time, dequantised as they are read.

Plain file reads at the offsets the headers give: nothing is mapped, so the memory in use is the tensors in use, and 64
shards cost no more than one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.formats.headers import TensorHeader, read_headers
from eyas.formats.quantization import Quantization, read_quantization
from eyas.models.dequantise import from_fp8_blocks, from_mxfp4, from_packed_int4

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Checkpoint:
    """A folder's tensors by name. `load` and `expert` give float32 on the CPU."""

    folder: Path
    headers: dict[str, TensorHeader]
    quantization: Quantization

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Raises InputError for a broken shard or index, and for a quantisation that is not supported."""
        quantization = read_quantization(folder)
        return cls(folder, read_headers(folder), quantization)

    def __contains__(self, name: str) -> bool:
        """Whether `name` can be loaded, stored as it is or quantised."""
        return any(stored in self.headers for stored in (name, packed_name(name), blocks_name(name)))

    def load(self, name: str) -> Tensor:
        """The tensor `name` in float32. Raises InputError where it is absent or stored in a way not declared."""
        if name in self.headers:
            return self._plain_or_fp8(name)
        if packed_name(name) in self.headers and self.quantization.scheme == "int4":
            return self._packed(name)
        raise self._missing(name)

    def row(self, name: str, index: int) -> Tensor:
        """`load(name)[index]` of a stack of experts or a table, reading that row alone."""
        if name in self.headers and self.headers[name].dtype in FLOATS:
            return self._read(name, index).float()
        if blocks_name(name) in self.headers and self.quantization.scheme == "mxfp4":
            self.expect(scales_name(name), (self.headers[blocks_name(name)].shape or ())[:-1])
            rows_RC = from_mxfp4(self._read(blocks_name(name), index), self._read(scales_name(name), index))
            return rows_RC.T.contiguous()  # gpt-oss multiplies x @ W, and stores W transposed
        raise self._missing(name)

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """`load(name)` of a matrix, `rows` of its rows at a time; read so where it is stored in floats."""
        header = self.headers.get(name)
        if header is None or header.dtype not in FLOATS or header.shape is None:
            yield from self.load(name).split(rows)
            return
        for start in range(0, header.shape[0], rows):
            yield self._read(name, slice(start, min(start + rows, header.shape[0]))).float()

    def _plain_or_fp8(self, name: str) -> Tensor:
        dtype = self.headers[name].dtype
        if dtype in FLOATS:
            return self._read(name).float()
        if dtype == "F8_E4M3" and self.quantization.scheme == "fp8" and f"{name}_scale_inv" in self.headers:
            block, shape = self.quantization.block, self.headers[name].shape or ()
            self.expect(f"{name}_scale_inv", tuple(-(-size // step) for size, step in zip(shape, block, strict=True)))
            return from_fp8_blocks(self._read(name), self._read(f"{name}_scale_inv"), block)
        raise InputError(
            wanted=f"{name} in floats, or as the config declares ({self.quantization.words})",
            got=f"{dtype} {list(self.headers[name].shape or ())}",
            where=str(self.folder),
            next="give a checkpoint whose config.json declares how its weights are stored",
        )

    def _packed(self, name: str) -> Tensor:
        stem = packed_name(name).removesuffix("_packed")
        self.expect(f"{stem}_shape", (2,))
        rows, columns = self._read(f"{stem}_shape").tolist()
        group_size = self.quantization.group_size
        self.expect(f"{stem}_packed", (rows, -(-columns // 8)))
        self.expect(f"{stem}_scale", (rows, -(-columns // group_size)))
        scale = self._read(f"{stem}_scale")
        return from_packed_int4(self._read(f"{stem}_packed"), scale, (rows, columns), group_size)

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise InputError where the stored tensor `name` is absent or not of `shape`."""
        header = self.headers.get(name)
        if header is None:
            raise self._missing(name)
        if header.shape != shape:
            raise self.misshapen(name, shape, header.shape or ())

    def misshapen(self, name: str, wanted: tuple[int, ...], got: tuple[int, ...]) -> InputError:
        return InputError(
            wanted=f"{name} of shape {list(wanted)}, by config.json",
            got=str(list(got)),
            where=str(self.folder),
            next="give the config.json that belongs to these tensors",
        )

    def _read(self, name: str, index: int | slice | None = None) -> Tensor:
        """The stored tensor, or row `index` of its first axis, or the rows of a slice (start and stop given)."""
        header = self.headers.get(name)
        if header is None:
            raise self._missing(name)
        if header.dtype not in DTYPES or header.shape is None:
            raise InputError(
                wanted=f"{name} in one of {', '.join(DTYPES)}",
                got=str(header.dtype),
                where=str(self.folder / header.file),
                next="give a checkpoint in a supported format",
            )
        if isinstance(index, int) and not 0 <= index < header.shape[0]:
            raise InputError(
                wanted=f"a row of {name} below {header.shape[0]}",
                got=str(index),
                where=str(self.folder),
                next="give token ids of this target's own tokenizer",
            )
        dtype, row = DTYPES[header.dtype], header.shape[1:]
        if isinstance(index, slice):
            shape, first = (index.stop - index.start, *row), index.start
        else:
            shape, first = (header.shape, 0) if index is None else (row, index)
        tensor = torch.empty(shape, dtype=dtype)
        buffer = tensor.reshape(-1).view(torch.uint8).numpy().data
        with (self.folder / header.file).open("rb", buffering=0) as file:
            file.seek(header.offset + first * math.prod(row) * dtype.itemsize)
            fill(file, buffer)
        return tensor

    def _missing(self, name: str) -> InputError:
        return InputError(
            wanted=f"the tensor {name}",
            got=f"no such tensor ({self.quantization.words})",
            where=str(self.folder),
            next="download the checkpoint again; if its names are of another architecture, report its config.json",
        )


def fill(file: FileIO, buffer: memoryview) -> None:
    """Read until `buffer` is full: one read may stop short of two gigabytes."""
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        assert count, "the headers were checked against the file's size"
        done += count


def packed_name(name: str) -> str:
    """compressed-tensors' name for the codes of `name`, which ends in `.weight`."""
    return f"{name}_packed"


def blocks_name(name: str) -> str:
    return f"{name}_blocks"


def scales_name(name: str) -> str:
    return f"{name}_scales"
