"""What a training step does many times, done with less.

Two small operations are one node each, whose backward pass is written out: autograd's would be a dozen operations, and
as many tensors kept. And the first layer's input, of which one half is the same token's at every step, is not put
together: a projection of it is the sum of two.

Shapes: B batch, N heads, T rows, E head width, H hidden, L tokens, M the tokens that any queried row is fed.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
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


def taken(states_BTH: Tensor, place_R: Tensor) -> Tensor:
    """Rows [B, R, H] of `states`, each at most once: so their gradients need no adding up."""
    return _Taken.apply(states_BTH, place_R)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = states.shape[1]
        return states.index_select(1, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (place,) = grads, ctx.saved_tensors
        return grad.new_zeros((grad.shape[0], ctx.rows, *grad.shape[2:])).index_copy_(1, place, grad), None


class Tokens:
    """The normed embeddings of a text's tokens, fed to one row after another, a step later each time: what a projection
    makes of them is made once for all steps, forward and backward."""

    def __init__(self, normed_BLH: Tensor, met_M: Tensor) -> None:
        self.normed, self.met = normed_BLH, met_M
        self.made: dict[nn.Linear, tuple[Tensor, Tensor, bool]] = {}

    def share(self, projection: nn.Linear, place_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """The embeddings' share [B, T, ...] in a projection of the tokens at `place_T` (None: of all), and the weight
        of the states' half. Who is asked about chosen tokens first is never asked about others than `met`."""
        if projection not in self.made:
            tokens, states = projection.weight.split(self.normed.shape[-1], dim=1)
            chosen = self.normed if place_T is None else taken(self.normed, self.met)
            self.made[projection] = linear(chosen, tokens, projection.bias), states, place_T is None
        share, states, every = self.made[projection]
        if place_T is None:
            return share, states
        return taken(share, place_T if every else torch.searchsorted(self.met, place_T)), states


@dataclass(frozen=True)
class Doubled:
    """The first layer's input, cat(normed embedding, normed state), in halves."""

    tokens: Tokens
    place: Tensor | None
    """Which of the tokens each row is fed; None: all of them, in their order."""
    state: Tensor | None = None

    def beside(self, state_BTH: Tensor) -> "Doubled":
        return replace(self, state=state_BTH)

    def rows(self, rows: Tensor) -> "Doubled":
        """Of rows that are fed all tokens, some."""
        assert self.place is None and self.state is not None, "chosen once, from all"
        return Doubled(self.tokens, rows, taken(self.state, rows))


class Wide(nn.Linear):
    """A projection of the first layer's input, put together or in halves."""

    def forward(self, input: "Tensor | Doubled") -> Tensor:
        if isinstance(input, Tensor):
            return super().forward(input)
        assert input.state is not None, "embeddings beside states"
        share, states = input.tokens.share(self, input.place)
        return share[:, : input.state.shape[1]] + linear(input.state, states)
