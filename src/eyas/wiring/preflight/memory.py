"""Will weights, draft and KV cache fit the GPUs? From headers and configs alone. No torch.

A lower bound: activations, graphs and the engine's own buffers come on top, which is what the fraction of memory left
aside is for. Units: bytes; GiB in words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.formats.headers import BITS, TensorHeader
from eyas.formats.problem import Problem
from eyas.formats.target_config import text_config
from eyas.launch.arguments import Launch
from eyas.wiring.loaders import TargetFacts

GIB = 2**30
FRACTIONS = {"sglang": 0.88, "vllm": 0.92}
"""Share of a GPU for weights and cache. vLLM's default; SGLang works its own out at start, about this."""
KV_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "fp8": 1, "float16": 2, "bfloat16": 2, "auto": 2}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes a GPU; `kv_tokens` is how many tokens of cache are left room for, None where that is not known."""

    weights: dict[str, int]
    """Of the whole target, by dtype."""
    target: int
    draft: int
    kv_per_token: int | None
    budget: int | None
    """Of the smallest GPU; None where no GPU is known."""

    @property
    def left(self) -> int | None:
        return None if self.budget is None else self.budget - self.target - self.draft

    @property
    def kv_tokens(self) -> int | None:
        left = self.left
        return None if left is None or not self.kv_per_token else max(left, 0) // self.kv_per_token

    @property
    def as_dict(self) -> dict[str, Any]:
        return {
            "weights_by_dtype": self.weights,
            "target_per_gpu": self.target,
            "draft_per_gpu": self.draft,
            "kv_per_token": self.kv_per_token,
            "budget_per_gpu": self.budget,
            "kv_tokens": self.kv_tokens,
        }


def plan_memory(
    launch: Launch,
    target_raw: Mapping[str, Any],
    target_headers: Mapping[str, TensorHeader] | None,
    draft_raw: Mapping[str, Any],
    draft_headers: Mapping[str, TensorHeader] | None,
    gpu_bytes: Sequence[int],
) -> MemoryPlan:
    """What a launch takes of each of its GPUs (the smallest counts)."""
    weights = by_dtype(target_headers or {})
    shares = launch.tp * launch.pp
    draft_shares = launch.draft_tp or launch.tp
    draft = sum(by_dtype(_draft_tensors(launch, draft_headers or {})).values())
    kv = kv_per_token(text_config(target_raw), launch, launch.tp) if target_raw else None
    draft_kv = kv_per_token(draft_raw, launch, draft_shares) if draft_raw else 0
    fraction = launch.memory_fraction or FRACTIONS.get(launch.engine.name, 0.9)
    return MemoryPlan(
        weights=weights,
        target=math.ceil(sum(weights.values()) / shares),
        draft=math.ceil(draft / draft_shares),
        kv_per_token=None if kv is None else math.ceil(kv / launch.pp) + (draft_kv or 0),
        budget=int(min(gpu_bytes) * fraction) if gpu_bytes else None,
    )


def by_dtype(headers: Mapping[str, TensorHeader]) -> dict[str, int]:
    """Bytes by dtype, largest first."""
    sums: dict[str, int] = {}
    for header in headers.values():
        if header.shape is not None and header.dtype is not None:
            sums[header.dtype] = sums.get(header.dtype, 0) + math.prod(header.shape) * BITS[header.dtype] // 8
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _draft_tensors(launch: Launch, headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """SGLang puts the target's embedding in the place of the draft's: it costs nothing."""
    shared = launch.sglang
    return {name: header for name, header in headers.items() if not (shared and "embed_tokens" in name)}


def kv_per_token(config: Mapping[str, Any], launch: Launch, shares: int) -> int | None:
    """Bytes of cache one token takes on one GPU: latent for MLA (whole on each), else keys and values by head.

    None where the config lacks a size.
    """
    layer = config.get("transformer_layer_config")
    config = layer if isinstance(layer, Mapping) else config
    size = KV_BYTES.get(launch.kv_cache_dtype or "auto", 2)
    layers = config.get("num_hidden_layers")
    if type(layers) is not int:
        return None
    rank, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if type(rank) is int and type(rope) is int:
        return layers * (rank + rope) * size
    heads = config.get("num_attention_heads")
    kv_heads, hidden = config.get("num_key_value_heads", heads), config.get("hidden_size")
    if type(kv_heads) is not int or type(heads) is not int or type(hidden) is not int:
        return None
    dim = config.get("head_dim") or hidden // heads
    return 2 * layers * math.ceil(kv_heads / shares) * dim * size


def memory_problems(plan: MemoryPlan, launch: Launch, target: TargetFacts) -> list[Problem]:
    """Where the weights do not fit, or leave less cache than one whole context."""
    if plan.budget is None:
        return []
    where = f"each GPU (tp {launch.tp}" + (f", pp {launch.pp})" if launch.pp > 1 else ")")
    needed = plan.target + plan.draft
    flag = "--tp-size" if launch.sglang else "--tensor-parallel-size"
    if needed > plan.budget:
        more = launch.tp * 2 ** math.ceil(math.log2(needed / plan.budget))
        found = f"{_gib(plan.target)} of target and {_gib(plan.draft)} of draft"
        return [_short(where, f"at most {_gib(plan.budget)} of weights", found, f"{flag} {more}, or smaller weights")]
    context = launch.context_length or target.context_length
    if context is not None and plan.kv_tokens is not None and plan.kv_tokens < context:
        context_flag = "--context-length" if launch.sglang else "--max-model-len"
        shorter = f"{context_flag} {plan.kv_tokens}, or " if plan.kv_tokens else ""
        fix = f"{shorter}{flag} {launch.tp * 2}"
        found = f"room for {plan.kv_tokens} tokens beside {_gib(needed)} of weights"
        return [_short(where, f"cache for one context of {context} tokens", found, fix, "warning")]
    return []


def _short(where: str, expected: str, found: str, fix: str, severity: str | None = None) -> Problem:
    return Problem("memory_short", where=where, expected=expected, found=found, fix=fix, severity=severity)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
