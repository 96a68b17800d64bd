"""Published weight quantisations, undone: stored bytes to float32, exactly.

Every product here is of two numbers with few bits, or with a power of two, and is done in float32 as the engines'
own kernels define it. Formats: DeepSeek-V3's block-scaled fp8, the OCP microscaling format (MXFP4) as gpt-oss lays it
out, compressed-tensors' pack-quantized int4.

States that an engine kept in fp8 are undone here too: `from_fp8_rows`.

Shapes: R rows (outputs), C columns (inputs), E experts (may lead), G groups of 32 columns, S columns under one scale,
T tokens, W width of their states.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 16 values of a 4-bit float with 2 exponent bits and 1 of mantissa, by code."""
E8M0_BIAS = 127


def from_fp8_blocks(weight_RC: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [R, C] of an e4m3 weight: each block of `block` rows by columns times its `weight_scale_inv`.

    `scale_inv` is [ceil(R / block rows), ceil(C / block columns)]: the last block of each axis may be cut short.
    """
    rows, columns = weight_RC.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    assert tuple(scale_inv.shape) == expected, f"scales {tuple(scale_inv.shape)}, expected {expected}"
    scale_RC = scale_inv.float().repeat_interleave(block[0], dim=0)[:rows]
    weight = weight_RC.float()
    for index, columns_RS in enumerate(weight.split(block[1], dim=1)):  # in place: no [R, C] of scales is made
        columns_RS.mul_(scale_RC[:, index, None])
    return weight


def from_fp8_rows(states_TW: Tensor, scale: Tensor | None) -> Tensor:
    """float32 [T, W] of e4m3 states: each token's times its scale, [T], [T, 1], or [T, k] for k blocks side by side.

    None: they were cast without a scale.
    """
    if scale is None:
        return states_TW.float()
    scale_TK = scale.float().reshape(len(states_TW), -1)
    width, blocks = states_TW.shape[1], scale_TK.shape[1]
    assert width % blocks == 0, f"{blocks} scales a token for states {width} wide"
    return states_TW.float() * scale_TK.repeat_interleave(width // blocks, dim=1)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., R, 32 G] of `blocks` uint8 [..., R, G, 16] and `scales` uint8 [..., R, G].

    A byte holds two values, the low four bits first; a scale byte b stands for 2^(b - 127).
    """
    assert blocks.shape[:-1] == scales.shape, f"blocks {tuple(blocks.shape)} against scales {tuple(scales.shape)}"
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - E8M0_BIAS)
    return from_nibbles(blocks, E2M1).mul_(powers[..., None]).flatten(-2)


def from_packed_int4(packed: Tensor, scale: Tensor, shape: tuple[int, int], group_size: int) -> Tensor:
    """float32 [R, C] of `packed` int32 [R, ceil(C / 8)] and `scale` [R, ceil(C / group_size)]; `shape` is (R, C).

    Column c lies in word c // 8 at bit 4 (c % 8), stored as value + 8; symmetric, so there is no zero point.
    """
    rows, columns = shape
    assert tuple(packed.shape) == (rows, -(-columns // 8)), f"packed {tuple(packed.shape)} for {shape}"
    assert tuple(scale.shape) == (rows, -(-columns // group_size)), f"scales {tuple(scale.shape)} for {shape}"
    bytes_ = packed.view(torch.uint8)  # the file's words are little-endian, as every machine torch runs on
    values = from_nibbles(bytes_, range(-8, 8))[:, :columns]
    for index, columns_RS in enumerate(values.split(group_size, dim=1)):
        columns_RS.mul_(scale[:, index, None].float())
    return values


def from_nibbles(codes: Tensor, values: Sequence[float]) -> Tensor:
    """float32 [..., 2 N] of uint8 [..., N]: two 4-bit codes a byte, low bits first, each `values[code]`.

    One look-up a byte, in a table of 256 pairs, and not one a code: half the index tensor, and in order at once.
    """
    table = torch.tensor([(values[byte & 0xF], values[byte >> 4]) for byte in range(256)], device=codes.device)
    return table.float().index_select(0, codes.reshape(-1).int()).reshape(*codes.shape[:-1], -1)
