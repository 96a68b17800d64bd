"""Two small operations of every training step, each one node whose backward pass is written out: autograd's would be a
dozen operations, and as many tensors kept.

Shapes: B batch, N heads, T rows, E head width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb


class RMSNorm(LlamaRMSNorm):
    """transformers' norm; in float32 its gradient takes half the time."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.is_grad_enabled() and hidden_states.dtype == self.weight.dtype == torch.float32:
            return _Normed.apply(hidden_states, self.weight, self.variance_epsilon)
        return super().forward(hidden_states)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (unit, scale, weight) = grads, ctx.saved_tensors
        by_x, by_weight, _ = ctx.needs_input_grad
        grad_weight = (grad * unit).flatten(0, -2).sum(0) if by_weight else None
        if not by_x:
            return None, grad_weight, None
        grad_unit = grad * weight
        along = torch.linalg.vecdot(grad_unit, unit)[..., None] / unit.shape[-1]
        return grad_unit.addcmul_(unit, along, value=-1).mul_(scale), grad_weight, None


def rotated(states_BNTE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    """Heads turned by their rows' rotary angles, as transformers' `apply_rotary_pos_emb` does (cos and sin are the same
    in both halves of a width); another last bit where a gradient is asked for."""
    if torch.is_grad_enabled() and states_BNTE.dtype == cos_BTE.dtype == torch.float32:
        return _Rotated.apply(states_BNTE, cos_BTE, sin_BTE)
    return apply_rotary_pos_emb(states_BNTE, states_BNTE[:, :0], cos_BTE, sin_BTE)[0]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(states, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, -1), None, None


def _turn(states: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """[x cos - sign y sin, y cos + sign x sin] of the halves x and y."""
    turned = states * cos[:, None]
    half = states.shape[-1] // 2
    turned[..., :half].addcmul_(states[..., half:], sin[:, None, :, :half], value=-sign)
    turned[..., half:].addcmul_(states[..., :half], sin[:, None, :, half:], value=sign)
    return turned
