"""Weights in int8: one scale an output, symmetric, so that a product is exact up to the rounding of the weights.

Shapes: O outputs, I inputs.
"""

import torch
from torch import Tensor


def quantise(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [O, I] and float32 scales [O]: weight is about int8 * scale, off by half a scale at most.

    A scale is the largest magnitude of its row over 127; a row of zeros has scale 1.
    """
    weight = weight_OI.detach().float()
    scale_O = weight.abs().amax(dim=1) / 127
    scale_O = torch.where(scale_O > 0, scale_O, 1.0)
    return (weight / scale_O[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale_O


def dequantise(weight_OI: Tensor, scale_O: Tensor) -> Tensor:
    """float32 [O, I]: what the products with `quantise`'s result multiply by."""
    return weight_OI.float() * scale_O[:, None]
