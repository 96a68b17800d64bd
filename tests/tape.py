"""CUDA graphs acted out on a CPU: what a step does to tensors is recorded, operation by operation, and done again.

As in a graph, operations read and write the very tensors they did when recorded, Python's numbers are those of that
day, none of its code runs again, and what waits for the device or asks what a tensor holds is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
FORBIDDEN = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.lift_fresh.default,  # torch.tensor() of Python numbers: a copy from the host
}


class Tape(TorchDispatchMode):
    """Records while it is entered; a call plays."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in FORBIDDEN:
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found

    def __call__(self) -> None:
        for func, args, kwargs, found in self.calls:
            places = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            again = func(*args, **kwargs)
            for place, computed in zip(tree_leaves(found), tree_leaves(again), strict=True):
                # A view of what went in, or what went in itself, needs nothing more.
                if isinstance(place, Tensor) and id_of(place) not in places:
                    place.copy_(computed)


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tape_recorder() -> Callable[[Callable[[], None]], Callable[[], None]]:
    def record(step: Callable[[], None]) -> Callable[[], None]:
        step()
        tape = Tape()
        with tape:
            step()
        return tape

    return record
