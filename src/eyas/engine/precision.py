"""Which precision a target is decoded in where that is left open: found by the products that this engine multiplies by.

A decoder reads every weight for a few rows. The compiled kernels compute in float32 whatever weights are kept in, so
that the fewer bytes win; torch's own may do worse in bfloat16 than in float32 (docs/decisions/0003). Hence the path
that the engine would take is asked, with a decoder's rows, over as much of such a model as no cache holds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eyas.engine.costs import best_seconds
from eyas.engine.linear import fastest_kernels, install
from eyas.engine.native import Matrix
from eyas.engine.native_build import load_native
from eyas.engine.native_forward import unsupported_config
from eyas.models.target import DTYPES, Target, load_target
from eyas.progress import say

ROWS = (1, 4)
"""Of a plain step, and of a round that verifies the default three levels."""
TRIES, MOST_WEIGHTS = 3, 2**26
WORTH = 0.9
"""A tie within this goes to float32."""
Product = Callable[[Tensor], Tensor]


def load_to_decode(name: str, precision: str, *, trust_remote_code: bool = False) -> Target:
    """A target in the precision that the engine is to run it in: int8 is made of bfloat16, "auto" is measured.

    Raises InputError as load_target.
    """
    dtype = engine_dtype if precision == "auto" else DTYPES["bfloat16" if precision == "int8" else precision]
    return load_target(name, dtype=dtype, trust_remote_code=trust_remote_code)


@torch.inference_mode()
def engine_dtype(config: Any) -> torch.dtype:
    """float32 or bfloat16, whichever multiplies faster on the path that the engine takes with such a target."""
    choices = tuple(DTYPES.values())
    products = [products_of(config, dtype) for dtype in choices]

    def multiply(index: int) -> None:
        inputs = {(rows, width): torch.ones(1, rows, width, dtype=choices[index]) for rows in ROWS for width in widths}
        for rows in ROWS:
            for width, product in products[index]:
                product(inputs[rows, width])

    widths = {width for width, _ in products[0]}
    seconds = best_seconds(multiply, range(len(choices)), TRIES)
    ratio = seconds[choices.index(torch.bfloat16)] / seconds[choices.index(torch.float32)]
    chosen = torch.bfloat16 if ratio < WORTH else torch.float32
    say(f"engine: {str(chosen).removeprefix('torch.')}, for bfloat16 multiplies in {ratio:.2f} of float32's time here")
    return chosen


def products_of(config: Any, dtype: torch.dtype) -> list[tuple[int, Product]]:
    """(width of the input, product) of layers like this target's, as the engine multiplies by them."""
    linears = _linears(config, dtype)
    library = load_native() if unsupported_config(config) is None else "not this target"
    if isinstance(library, str):
        install(linears, fastest_kernels(linears, ROWS))
        return [(linear.in_features, linear) for linear in linears]
    return [(linear.in_features, Matrix(library, linear.weight.detach())) for linear in linears]


def _linears(config: Any, dtype: torch.dtype) -> list[nn.Linear]:
    """The widest products of every layer, as many as no cache holds; their values cost nothing."""
    width, inner = config.hidden_size, getattr(config, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * width
    layers = max(1, min(config.num_hidden_layers, MOST_WEIGHTS // (2 * width * inner)))
    return [_filled(*shape, dtype) for shape in [(width, inner), (inner, width)] * layers]


def _filled(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)
    linear.weight = nn.Parameter(torch.full((outputs, inputs), 0.01, dtype=dtype), requires_grad=False)
    return linear
