"""The vocabulary's share of the TTT loss: head, softmax, objective and their gradients, a chunk of rows at a time.

Shapes: C rows in the loss, H hidden, D draft vocabulary, P teacher rows, R a chunk's rows, B a block's.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from eyas.training.chains import Chains
from eyas.training.objectives import Objective

CHUNK, LEAST = 1024, 256
"""Rows whose draft-vocabulary logits exist at one time, at most and at least: memory stays flat."""
CHUNK_LOGITS = 2**23
"""Logits of a chunk that has more rows than the least: what a chunk adds to the head's gradient costs as much whatever
its rows, so many rows are cheap for a small vocabulary, and memory for a large one."""
BLOCK_LOGITS = 2**17
"""Logits scored at a time on a CPU: they, their shares and the teacher's stay near the core between one operation and
the next, half a megabyte each."""


def chunk_rows(words: int) -> int:
    """Rows of a chunk, for a draft vocabulary of so many words."""
    return min(CHUNK, max(LEAST, CHUNK_LOGITS // words))


class ChunkedLoss(torch.autograd.Function):
    """sum over rows of weight * objective(head(x)), its gradients made in the same pass over the logits.

    The logits of all rows would be the largest tensor of training by far; here they exist a chunk at a time, in the
    dtype of the products, in buffers that are used again (fresh pages cost more than what is computed in them), and
    turn into their own gradient in place: one softmax serves both, in float32. Returns the weighted sum, and per row
    the loss and whether no logit is above that of `truth`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_CH: Tensor,
        weight_DH: Tensor,
        teacher_PD: Tensor,
        where_C: Tensor,
        truth_C: Tensor,
        weight_C: Tensor,
        dtype: torch.dtype,
        objective: Objective,
        chains: Chains | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = x_CH.detach().to(dtype), weight_DH.detach().to(dtype)
        grad_x, grad_weight = torch.empty_like(x_CH), None
        if ctx.needs_input_grad[1]:
            grad_weight = (torch.empty_like if len(x) else torch.zeros_like)(weight_DH)
        loss_C, hit_C = torch.empty_like(weight_C), torch.empty_like(truth_C, dtype=torch.bool)
        bounds = _bounds(len(x), chunk_rows(len(weight)), chains)
        rows = max((last - first for first, last in pairwise(bounds)), default=0)
        block = min(rows, max(1, BLOCK_LOGITS // len(weight))) if x.device.type == "cpu" else rows
        logits_RD = weight.new_empty((rows, len(weight)))
        buffers_3BD = teacher_PD.new_empty((3, block, len(weight)))
        for first, last in pairwise(bounds):
            part, logits = slice(first, last), logits_RD[: last - first]
            torch.mm(x[part], weight.T, out=logits)
            loss_C[part], hit_C[part] = _score(logits, teacher_PD, where_C[part], truth_C[part], objective, buffers_3BD)
            slope_by = weight_C[part]
            if chains is not None:
                loss_C[part], slope_by = chains.coupled(part, 1 - loss_C[part], slope_by)
            _product(logits, weight, grad_x[part])
            grad_x[part] *= slope_by[:, None]
            if grad_weight is not None:
                add = _add_product if first else _product
                add(logits.T, (x[part] * slope_by[:, None]).to(dtype), grad_weight)
        ctx.gradients = grad_x, grad_weight
        ctx.mark_non_differentiable(loss_C, hit_C)
        return (loss_C * weight_C).sum(), loss_C, hit_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the loss goes back once: its gradients are scaled in place"
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (None if gradient is None else gradient.mul_(grads[0]) for gradient in gradients)
        return *scaled, None, None, None, None, None, None, None


def _bounds(rows: int, most: int, chains: Chains | None) -> list[int]:
    """Where chunks of up to `most` rows begin and end, all of about one size: a short one at the end would waste its
    products."""
    if not rows:
        return []
    size = -(-rows // -(-rows // most))
    return [*range(0, rows, size), rows] if chains is None else chains.bounds(size + chains.steps - 1)


def _score(
    logits_RD: Tensor, teacher_PD: Tensor, where_R: Tensor, truth_R: Tensor, objective: Objective, buffers_3BD: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each row and whether no logit is above that of `truth`; the logits become the loss's slope."""
    losses, hits = [], []
    block = buffers_3BD.shape[1]
    for kept, where, truth in zip(*(each.split(block) for each in (logits_RD, where_R, truth_R)), strict=True):
        shares, buffer, wide = buffers_3BD[:, : len(kept)]
        logits = kept if kept.dtype == wide.dtype else wide.copy_(kept)
        teacher = _rows_at(teacher_PD, where, buffer)
        top = logits.amax(dim=-1)
        hits.append(logits.gather(1, truth[:, None])[:, 0] == top)
        torch.softmax(logits, dim=-1, out=shares)
        # log sum exp = top - log(share of the top): one softmax serves both
        loss, slope = objective.score(logits, shares, top - shares.amax(dim=-1).log(), teacher)
        losses.append(loss)
        if slope is not kept:
            kept.copy_(slope)
    return torch.cat(losses), torch.cat(hits)


def _rows_at(teacher_PD: Tensor, where_R: Tensor, buffer_RD: Tensor) -> Tensor:
    """The teacher's rows: themselves where they follow one another, as rows of one document mostly do, else copied."""
    first = int(where_R[0])
    if torch.equal(where_R, torch.arange(first, first + len(where_R), device=where_R.device)):
        return teacher_PD[first : first + len(where_R)]
    return torch.index_select(teacher_PD, 0, where_R, out=buffer_RD)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def _add_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    if left.dtype == out.dtype:
        out.addmm_(left, right)
    else:
        out.add_(left @ right)
