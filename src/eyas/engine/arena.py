"""Weights side by side in memory, in the order a forward reads them, on large pages where the system gives them.

Reading hundreds of megabytes a token through pages of 4 KiB costs an address look-up every 4 KiB and stops the
hardware's prefetching there (docs/lab.md).
"""

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ALIGNMENT, LARGE_PAGE = 64, 2**21


def large_pages(size: int) -> Tensor:
    """uint8 [size], on large pages if the system agrees; fresh memory, not yet touched."""
    memory = torch.empty(size + LARGE_PAGE, dtype=torch.uint8)
    start = -(-memory.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and size >= LARGE_PAGE:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)  # a refusal changes nothing
    first = start - memory.data_ptr()
    return memory[first : first + size]


def side_by_side(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of `tensors`, one after the other in one piece of memory."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    # A parameter may be given such a copy, and be trained with later: it stays the kind of tensor it was.
    with torch.inference_mode(tensors[0].is_inference()):
        memory = large_pages(size)
        copies = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            copy = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor.detach()))
    return copies


def move_weights(linears: Sequence[nn.Linear]) -> None:
    """Let `linears` keep their weights side by side: the same values elsewhere, no second copy stays."""
    for linear, copy in zip(linears, side_by_side([linear.weight for linear in linears]), strict=True):
        linear.weight.data = copy
