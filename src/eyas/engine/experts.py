"""A mixture's experts with one row at a time: a row's bits then do not depend on who else was routed where.

transformers' own ways multiply as many rows as were routed to an expert, which no bucket fixes.

Shapes: R rows, C chosen experts a row, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from eyas.engine.cache import RUNNING

EXPERTS = "eyas"
"""The name under which transformers' modules find `experts_by_row`."""
MANY = 64
"""Rows from which on a forward is a prompt's, which every way of decoding shares."""


def experts_by_row(module: Any, hidden_RH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: `top_k_index`, `top_k_weights` [R, C]; returns [R, H].

    On CUDA each pair is one member of a batched product, for reading the choice on the host would cost more.
    """
    if hidden_RH.shape[0] > MANY or RUNNING.get() is None:
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_RH, top_k_index, top_k_weights)
    if hidden_RH.device.type != "cpu":
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](module, hidden_RH, top_k_index, top_k_weights)
    mixed = torch.zeros_like(hidden_RH)
    for row, (chosen, weights) in enumerate(zip(top_k_index.tolist(), top_k_weights, strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            mixed[row] += (weight * _expert(module, hidden_RH[row : row + 1], expert)[0]).to(mixed.dtype)
    return mixed


def use_experts_by_row(model: PreTrainedModel) -> str | None:
    """Let `model` compute its experts so; what it used before, None where it has none to exchange."""
    if not model._can_set_experts_implementation():
        return None
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_by_row)
    before = model.config.get_text_config()._experts_implementation or "eager"
    model.set_experts_implementation(EXPERTS)
    return before


def _expert(module: Any, x_1H: Tensor, expert: int) -> Tensor:
    inner = "gate_up_proj" if module.has_gate else "up_proj"
    states = _product(module, x_1H, inner, expert)
    states = module._apply_gate(states) if module.has_gate else module.act_fn(states)
    states = _product(module, states, "down_proj", expert)
    return module.post_expert_norm(states) if module.has_post_expert_norm else states


def _product(module: Any, x: Tensor, name: str, expert: int) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return nn.functional.linear(x, weight.T if module.is_transposed else weight, bias)
