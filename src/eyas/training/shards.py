"""A tensor that several processes hold in shards (FSDP2), by rows."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """`tensor` itself, or this process's rows of it where it is in shards; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """`tensor` itself, or all of it where it is in shards (all processes must ask)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_as(whole: Tensor, tensor: Tensor) -> Tensor:
    """`whole`, which every process has, held as `tensor` is; nothing is sent."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
