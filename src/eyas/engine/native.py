"""A decoder as native.cpp sees it: its weights by address, its cache, and one call a forward.

The structures mirror native.cpp's field by field. `Decoder` owns every tensor whose address it hands out. Arithmetic is
float32 whatever the weights are kept in: float32 and bfloat16 weights are the model's own, int8 ones are made here.

Shapes: R rows, H hidden, E head width, P positions, B boundaries.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from eyas.engine.arena import move_weights, side_by_side
from eyas.engine.cache import path_to
from eyas.engine.int8 import quantise
from eyas.engine.rows import TextRows

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class CMatrix(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("data", "scale", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs", "kind")),
    )


LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("input_norm", "hidden_norm", "post_norm", "q_norm", "k_norm")


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, CMatrix) for name in LINEARS),
        *((name, c_void_p) for name in NORMS),
        ("window", c_int64),
    )


class CModel(ctypes.Structure):
    _fields_ = (
        ("layers", POINTER(CLayer)),
        *((name, c_int64) for name in ("count", "hidden", "heads", "kv_heads", "width", "inner")),
        ("embedding", CMatrix),
        *((name, c_void_p) for name in ("final_norm", "cos", "sin")),
        *((name, c_int64) for name in ("cache_kind", "norm_before_residual")),
        ("eps", c_float),
        ("scale", c_float),
    )


class CText(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "followed")),
        *((name, c_int64) for name in ("slots", "base", "first", "depths", "row")),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("ids", "positions", "owner", "texts")),
        *((name, c_int64) for name in ("rows", "slots")),
        *((name, c_void_p) for name in ("state", "last", "normed", "boundaries", "taps")),
        *((name, c_int64) for name in ("tapped", "threads", "last_only", "prompt")),
        ("scratch", c_void_p),
    )


@dataclass(frozen=True)
class LayerParts:
    """One layer's modules by native.cpp's names; norms that it lacks are absent. `window` 0: full attention."""

    linears: dict[str, nn.Linear]
    norms: dict[str, Tensor]
    window: int = 0


@dataclass(frozen=True)
class DecoderParts:
    """What a decoder is made of."""

    layers: list[LayerParts]
    embedding: Tensor
    final_norm: Tensor
    heads: int
    kv_heads: int
    width: int
    inner: int
    eps: float
    scale: float
    norm_before_residual: bool = False


Rope = Callable[[int], tuple[Tensor, Tensor]]
"""cos and sin [P, E], float32, of the first P positions."""


@dataclass
class Rows:
    """What a forward gives: the last layer's output and its final norm, both [1, R, H], and taps [1, R, B, H]."""

    last: Tensor
    normed: Tensor
    taps: Tensor


@dataclass
class Matrix:
    """A linear's weight as the library multiplies by it; keeps what it points to alive."""

    library: ctypes.CDLL
    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    struct: CMatrix = field(init=False)

    def __post_init__(self) -> None:
        outputs, inputs = self.weight.shape
        self.struct = CMatrix(
            self.weight.data_ptr(), _address(self.scale), _address(self.bias), outputs, inputs, KINDS[self.weight.dtype]
        )

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x_1RI: Tensor) -> Tensor:
        """float32 [1, R, O]."""
        x = x_1RI.float().contiguous()
        rows = x.shape[-2]
        y = torch.empty((1, rows, self.struct.outputs))
        self.library.eyas_multiply(ctypes.byref(self.struct), x.data_ptr(), rows, y.data_ptr(), torch.get_num_threads())
        return y


def matrices(library: ctypes.CDLL, linears: Sequence[nn.Linear], int8: bool) -> list[Matrix]:
    """`linears` in the order a forward reads them. Unless rounded to int8 the weights stay the linears' own, moved."""
    biases = [None if linear.bias is None else linear.bias.detach().float().contiguous() for linear in linears]
    if not int8:
        move_weights(linears)
        weights = [linear.weight.detach() for linear in linears]
        return [Matrix(library, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    rounded = [quantise(linear.weight) for linear in linears]
    weights = side_by_side([weight for weight, _ in rounded])
    scales = [scale for _, scale in rounded]
    return [Matrix(library, *parts) for parts in zip(weights, biases, scales, strict=True)]


class Decoder:
    """Layers and rope tables of one model, ready to run; `weight_bytes` is what a forward reads."""

    def __init__(
        self,
        library: ctypes.CDLL,
        parts: DecoderParts,
        cache_dtype: torch.dtype,
        rope: Rope,
        others: Sequence[nn.Linear],
        int8: bool,
    ) -> None:
        self.library, self.parts, self.dtype, self._rope = library, parts, cache_dtype, rope
        linears = [layer.linears[name] for layer in parts.layers for name in LINEARS]
        made = matrices(library, [*linears, *others], int8)
        self.others = made[len(linears) :]
        """The linears beside the layers: a head, a draft's fc."""
        self._matrices = [
            dict(zip(LINEARS, made[first : first + len(LINEARS)], strict=True))
            for first in range(0, len(linears), len(LINEARS))
        ]
        self._norms = [{name: norm.detach().float() for name, norm in layer.norms.items()} for layer in parts.layers]
        self._final_norm = parts.final_norm.detach().float()
        self._embedding = Matrix(library, parts.embedding.detach())
        self.hidden = parts.final_norm.shape[0]
        self._layers = (CLayer * len(parts.layers))()
        self._cos = self._sin = torch.empty(0)
        self._scratch = torch.empty(0)
        self._model = CModel(
            layers=self._layers,
            count=len(parts.layers),
            hidden=self.hidden,
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            width=parts.width,
            inner=parts.inner,
            embedding=self._embedding.struct,
            final_norm=self._final_norm.data_ptr(),
            cache_kind=KINDS[cache_dtype],
            norm_before_residual=parts.norm_before_residual,
            eps=parts.eps,
            scale=parts.scale,
        )

    @property
    def weight_bytes(self) -> int:
        return sum(matrix.nbytes for layer in self._matrices for matrix in layer.values())

    def run(
        self,
        texts: Sequence[TextRows],
        state: Tensor | None = None,
        boundaries: Sequence[int] = (),
        *,
        prompt: bool = False,
        last_only: bool = False,
    ) -> Rows:
        """The rows of one text or of several side by side; a row's bits do not depend on the others'.

        `state` [1, R, H]: what a draft's rows are fed. `prompt`: rows that every way of decoding shares, so that their
        bits need not be those of single rows. `last_only`: of the last layer's output only the last row is wanted, and
        no other row of `Rows.last` and `Rows.normed` means anything.
        """
        placed = [_Placed.of(text, self.parts, row) for text, row in zip(texts, _starts(texts), strict=True)]
        ids = _integers([token for text in texts for token in text.ids])
        rows, slots, threads = len(ids), max(text.cache.capacity for text in texts), torch.get_num_threads()
        self._bind(slots)
        needed = self.library.eyas_scratch(ctypes.byref(self._model), rows, slots, threads)
        if needed > self._scratch.numel():
            self._scratch = torch.empty(needed)
        last, normed = torch.empty((2, 1, rows, self.hidden)).unbind()
        found = Rows(last, normed, torch.empty((1, rows, len(boundaries), self.hidden)))
        positions = _integers([position for one in placed for position in one.positions])
        owner = _integers([index for index, text in enumerate(texts) for _ in text.ids])
        structs, tapped = (CText * len(texts))(*(one.struct for one in placed)), _integers(boundaries)
        fed = None if state is None else state.float().contiguous()
        step = CStep(
            ids=ctypes.addressof(ids),
            positions=ctypes.addressof(positions),
            owner=ctypes.addressof(owner),
            texts=ctypes.addressof(structs),
            rows=rows,
            slots=slots,
            state=_address(fed),
            last=found.last.data_ptr(),
            normed=found.normed.data_ptr(),
            boundaries=ctypes.addressof(tapped),
            taps=found.taps.data_ptr(),
            tapped=len(boundaries),
            threads=threads,
            last_only=last_only,
            prompt=prompt,
            scratch=self._scratch.data_ptr(),
        )
        self.library.eyas_forward(ctypes.byref(self._model), ctypes.byref(step))
        return found

    def norm(self, x_1RH: Tensor) -> Tensor:
        """The final norm of rows [1, R, H]."""
        x = x_1RH.float().contiguous()
        y = torch.empty_like(x)
        self.library.eyas_norm(
            x.data_ptr(), self._final_norm.data_ptr(), x.shape[-2], self.hidden, self.parts.eps, y.data_ptr()
        )
        return y

    def _bind(self, positions: int) -> None:
        """Point at the weights, once, and at rope tables for so many positions."""
        if positions <= self._cos.shape[0]:
            return
        self._cos, self._sin = self._rope(positions)
        self._model.cos, self._model.sin = self._cos.data_ptr(), self._sin.data_ptr()
        for index, (layer, part) in enumerate(zip(self._layers, self.parts.layers, strict=True)):
            for name, matrix in self._matrices[index].items():
                setattr(layer, name, matrix.struct)
            for name, norm in self._norms[index].items():
                setattr(layer, name, norm.data_ptr())
            layer.window = part.window


@dataclass
class _Placed:
    """A text's rows as the library takes them; keeps what the structure points to alive."""

    struct: CText
    positions: Sequence[int]
    kept: tuple[Any, ...]

    @classmethod
    def of(cls, text: TextRows, parts: DecoderParts, row: int) -> "_Placed":
        cache, rows = text.cache, len(text.ids)
        first, positions, followed, depth = _places(rows, text.start, text.parents)
        assert text.start + first + rows <= cache.capacity, "reserve() rows before a forward over them"
        if cache.addresses is None:
            buffers = [cache.buffers(index, parts.kv_heads, parts.width) for index in range(len(parts.layers))]
            keys, values = (_pointers(side) for side in zip(*buffers, strict=True))
            cache.addresses = keys, values
        keys, values = cache.addresses
        struct = CText(
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            followed=None if followed is None else ctypes.addressof(followed),
            slots=cache.capacity,
            base=text.start,
            first=first,
            depths=depth,
            row=row,
        )
        return cls(struct, positions, (keys, values, followed))


def _starts(texts: Sequence[TextRows]) -> list[int]:
    """Where each text's rows begin."""
    return [0, *accumulate(len(text.ids) for text in texts)][:-1]


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _places(
    rows: int, start: int, parents: Sequence[int] | None
) -> tuple[int, Sequence[int], ctypes.Array[c_int64] | None, int]:
    """First slot's offset, positions [R], and for a tree the slot offsets [R, depths] of what each row follows."""
    if parents is None:
        return 0, range(start, start + rows), None, 0
    first = len(parents) - rows
    paths = [path_to(row, parents) for row in range(first, len(parents))]
    depth = max(map(len, paths))
    positions = [start + len(path) - 1 for path in paths]
    followed = _integers([row for path in paths for row in [*path, *[0] * (depth - len(path))]])
    return first, positions, followed, depth


def _integers(values: Sequence[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(values))(*values)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
