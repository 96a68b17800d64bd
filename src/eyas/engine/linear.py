"""Which kernel multiplies: torch's own F.linear, or oneDNN with weights packed beforehand, by measurement at start.

On the CPUs tried either wins, by up to a factor of two, depending on CPU, precision and number of rows
(docs/engine.md), so nothing here is a constant. The oneDNN ops are private to torch: they are tested against F.linear
before use, and left aside, aloud, where they are missing or wrong.

Shapes: R rows, I in, O out.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from eyas.engine.int8 import dequantise, quantise
from eyas.progress import say


class Kernel(Protocol):
    """input [..., R, I] to [..., R, O], as nn.Linear's forward."""

    def __call__(self, input: Tensor) -> Tensor: ...


TRIES, SAMPLE_BYTES = 4, 256 * 2**20


def torch_kernel(weight_OI: Tensor, bias_O: Tensor | None) -> Kernel:
    return partial(nn.functional.linear, weight=weight_OI, bias=bias_O)


def packed_kernel(weight_OI: Tensor, bias_O: Tensor | None) -> Kernel:
    """oneDNN with the weight reordered once (a second copy of it in memory)."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), 1)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda input: multiply(input, packed, bias_O, "none", [], "")


def int8_kernel(weight_OI: Tensor, bias_O: Tensor | None) -> Kernel:
    """torch's int8 product, which takes bfloat16 rows; where it is missing, wrong or was not tried (anywhere but on the
    CPU), F.linear over the int8 weights widened again."""
    weight, scale_O = quantise(weight_OI)
    if weight.device.type != "cpu" or weight.shape[1] % INT8_INPUTS or not int8_product_works():
        return torch_kernel(dequantise(weight, scale_O).to(weight_OI.dtype), bias_O)
    scale, multiply = scale_O.to(torch.bfloat16), torch.ops.aten._weight_int8pack_mm

    def kernel(input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
        product = multiply(rows, weight, scale).to(input.dtype).view(*input.shape[:-1], -1)
        return product if bias_O is None else product + bias_O

    return kernel


INT8_INPUTS = 64
"""torch 2.13's int8 product was seen to crash, or to read past a row's end, for widths that are no multiple of 16."""


@cache
def int8_product_works() -> bool:
    """Whether torch's int8 product computes what its weights say, to bfloat16's precision."""
    generator = torch.Generator().manual_seed(0)
    weight, scale_O = quantise(torch.randn(96, 64, generator=generator))
    x = torch.randn(3, 64, generator=generator).to(torch.bfloat16)
    try:
        product = torch.ops.aten._weight_int8pack_mm(x, weight, scale_O.to(torch.bfloat16))
        expected = nn.functional.linear(x.float(), dequantise(weight, scale_O))
        torch.testing.assert_close(product.float(), expected, rtol=3e-2, atol=1e-1)
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError) as error:
        say(f"engine: torch's int8 product is not used: {str(error).strip().splitlines()[0]}")
        return False
    return True


KERNELS: dict[str, Callable[[Tensor, Tensor | None], Kernel]] = {"torch": torch_kernel, "onednn": packed_kernel}


def available_kernels(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Names of the kernels that compute what F.linear computes here."""
    if device.type != "cpu":
        return ["torch"]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    names = ["torch"]
    for name in KERNELS.keys() - {"torch"}:
        try:
            kernel = KERNELS[name](weight, None)
            for rows in (1, 3):
                x = torch.randn(1, rows, 64, generator=generator).to(dtype)
                torch.testing.assert_close(kernel(x), nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)
            names.append(name)
        except (RuntimeError, AttributeError, AssertionError) as error:
            say(f"engine: {name} linears are not used: {str(error).strip().splitlines()[0]}")
    return names


def fastest_kernels(linears: Sequence[nn.Linear], rows: Iterable[int]) -> dict[int, str]:
    """For each number of rows, the kernel that runs `linears` one after the other fastest (best of a few tries).

    Weights are streamed from memory as in a forward: enough layers are taken that no cache holds them. Without linears
    (GPT-2 has modules of its own) there is nothing to choose.
    """
    if not linears:
        return dict.fromkeys(rows, "torch")
    sample = _sample(linears)
    names = available_kernels(sample[0].weight.dtype, sample[0].weight.device)
    if len(names) == 1:
        return dict.fromkeys(rows, names[0])
    made = {name: [(KERNELS[name](m.weight, m.bias), m.in_features) for m in sample] for name in names}
    choice = {}
    for count in rows:
        inputs = {m.in_features: torch.randn(1, count, m.in_features).to(m.weight.dtype) for m in sample}
        seconds = {name: _seconds(kernels, inputs) for name, kernels in made.items()}
        choice[count] = min(names, key=lambda name: seconds[name])
    return choice


def install(linears: Iterable[nn.Linear], by_rows: Mapping[int, str]) -> None:
    """Let `linears` use the named kernel for these numbers of rows, F.linear for all others."""
    for linear in linears:
        kernels = {name: KERNELS[name](linear.weight, linear.bias) for name in set(by_rows.values())}
        table = {rows: kernels[name] for rows, name in by_rows.items()}
        linear.forward = _dispatch(table, torch_kernel(linear.weight, linear.bias))


def install_int8(linears: Iterable[nn.Linear]) -> None:
    """Let `linears` multiply by their weights rounded to int8, whatever the number of rows."""
    for linear in linears:
        linear.forward = int8_kernel(linear.weight, linear.bias)


def uninstall(linears: Iterable[nn.Linear]) -> None:
    """Give `linears` their own forward back."""
    for linear in linears:
        linear.__dict__.pop("forward", None)


def _dispatch(table: Mapping[int, Kernel], default: Kernel) -> Kernel:
    def forward(input: Tensor) -> Tensor:
        return table.get(input.shape[-2], default)(input)

    return forward


def _sample(linears: Sequence[nn.Linear]) -> list[nn.Linear]:
    sample, size = [], 0
    for linear in linears:
        sample.append(linear)
        size += linear.weight.nbytes
        if size >= SAMPLE_BYTES:
            break
    return sample


def _seconds(kernels: Sequence[tuple[Kernel, int]], inputs: Mapping[int, Tensor]) -> float:
    best = float("inf")
    for _ in range(TRIES):
        started = time.perf_counter()
        for kernel, width in kernels:
            kernel(inputs[width])
        best = min(best, time.perf_counter() - started)
    return best
