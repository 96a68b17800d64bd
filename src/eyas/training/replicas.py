"""The draft as several processes hold it: whole in each (DDP), or in shards (FSDP2), its loss one module's forward.

Both hook a module's forward and backward, and both count on the same of them everywhere: so the whole unrolled loss is
one forward, every process runs as many of them in a step as every other, and one that has no row to train still gives
every parameter a gradient, of zeros. Gradients are summed, not averaged: a row's weight already holds the denominator
that was counted over all.
"""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from eyas.models.checkpoint import draft_tensors
from eyas.models.draft import Draft
from eyas.training.distributed import Ranks
from eyas.training.loss import Batch, Sums
from eyas.training.optimise import trained

Compute = Callable[[Batch, Sequence[float]], tuple[Tensor, Sums]]


class Scored(nn.Module):
    """A draft and its loss: `forward` is what is hooked."""

    def __init__(self, draft: Draft, compute: Compute, steps: int) -> None:
        super().__init__()
        self.draft, self.compute, self.steps = draft, compute, steps

    def forward(self, batch: Batch | None, weights: Sequence[float]) -> tuple[Tensor, Sums]:
        """The weighted loss and its sums; 0 with a gradient of zeros for no batch, or one without a row to train."""
        if batch is None or not len(batch.rows.index[0]):
            nothing = torch.stack([parameter.sum() for parameter in trained(self.draft).values()]).sum() * 0.0
            return nothing, Sums.none(self.steps)
        return self.compute(batch, weights)


class Replicas:
    """The draft of one process, or this process's part of one that several train."""

    def __init__(self, draft: Draft, compute: Compute, steps: int, ranks: Ranks, parallel: str) -> None:
        self.draft, self.ranks = draft, ranks
        self.scored = Scored(draft, compute, steps)
        self.alone = ranks.size == 1
        """Whether the draft's weights are whole and its forward without hooks."""
        self.ddp: DistributedDataParallel | None = None
        self.fsdp: FSDPModule | None = None
        if self.alone:
            return
        for tensor in draft_tensors(draft).values():  # the same start everywhere, whatever machine drew it
            dist.broadcast(tensor, src=0)
        if parallel == "fsdp":
            self.fsdp = self._sharded()
        else:
            with warnings.catch_warnings():  # torch 2.13 has another name for it, torch 2.9 only this one
                warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
                self.ddp = DistributedDataParallel(
                    self.scored, broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True
                )
            self.ddp.register_comm_hook(None, _summed)

    def _sharded(self) -> FSDPModule:
        """One group for all parameters: each is used at every TTT step, so gathering layer by layer would repeat it."""
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.size,))
        frozen = {parameter for parameter in self.draft.parameters() if not parameter.requires_grad}
        hooked: FSDPModule = fully_shard(self.scored, mesh=mesh, ignored_params=frozen or None)
        hooked.set_gradient_divide_factor(1.0)
        hooked.set_force_sum_reduction_for_comms(True)
        return hooked

    def __call__(self, batch: Batch | None, weights: Sequence[float]) -> tuple[Tensor, Sums]:
        if self.alone:
            return self.scored.forward(batch, weights)
        return (self.ddp or self.scored)(batch, weights)

    @contextmanager
    def sending(self, last: bool) -> Generator[None]:
        """Around forward and backward of one of a step's batches: gradients travel once, with the last."""
        if self.fsdp is not None:
            self.fsdp.set_requires_gradient_sync(last)
            self.fsdp.set_is_last_backward(last)
            self.fsdp.set_reshard_after_backward(last)
        with self.ddp.no_sync() if self.ddp is not None and not last else nullcontext():
            yield

    @contextmanager
    def whole(self) -> Generator[None]:
        """All weights in each process, and no hook: what is computed inside may differ from process to process.

        Entered and left by all together. No `state_dict()` inside: FSDP2 shards again before it answers.
        """
        before, self.alone = self.alone, True
        if self.fsdp is not None:
            self.fsdp.unshard()
        yield
        if self.fsdp is not None:
            self.fsdp.reshard()
        self.alone = before


def _summed(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """In place of DDP's mean."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
