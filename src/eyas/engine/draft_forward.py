"""The draft's forward over its own cache: the module itself, or native.cpp over the module's weights.

Its rows need no fixed bits: what it drafts is verified.

Shapes: R rows, A width of the taps, H hidden, D draft vocabulary.
"""

import ctypes
from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eyas.engine.cache import KVCache, depths
from eyas.engine.forward import Forward
from eyas.engine.linear import fastest_kernels, install, install_int8
from eyas.engine.native import Decoder, DecoderParts, LayerParts
from eyas.engine.native_forward import STATIC_ROPE, NativeForward
from eyas.engine.rows import TextRows
from eyas.models.draft import Draft


class DraftForward(Protocol):
    """Rows are fed a state [1, R, H] and the ids of the tokens that follow theirs."""

    draft: Draft
    cache: KVCache
    positions: list[int]
    """Rotary positions of the latest forward's rows."""

    def fork(self) -> "DraftForward":
        """The same weights over a cache of its own."""
        ...

    def settle(self, most: int, kernels: str) -> list[nn.Linear]:
        """Choose kernels for 1..`most` rows; the linears that were exchanged."""
        ...

    def fuse(self, taps_1RA: Tensor) -> Tensor:
        """The state of verified rows."""
        ...

    def feedback(self, hidden_1RH: Tensor) -> Tensor:
        """The state of rows that follow the draft's own."""
        ...

    def chain(self, state_1RH: Tensor, ids: Sequence[int], start: int, last: int = 1) -> Tensor:
        """h [1, last, H] of the last of rows at positions start..., which follow everything before."""
        ...

    def tree(self, state_1RH: Tensor, ids: Sequence[int], start: int, parents: Sequence[int]) -> Tensor:
        """h [1, R, H] of the last len(ids) rows of a growing tree (KVCache.begin_tree)."""
        ...

    def logits(self, hidden_1RH: Tensor) -> Tensor:
        """Draft-vocabulary logits [1, R, D]."""
        ...


class PlainDraft:
    """Through the draft's own modules."""

    def __init__(self, draft: Draft, *, int8: bool = False) -> None:
        self.draft, self.int8 = draft, int8
        self.cache = KVCache(draft.fc.weight.dtype, draft.fc.weight.device)
        self.positions: list[int] = []

    def fork(self) -> "PlainDraft":
        return PlainDraft(self.draft, int8=self.int8)

    def settle(self, most: int, kernels: str) -> list[nn.Linear]:
        """Its rows need no fixed bits, so each row count takes its own fastest."""
        linears = [module for module in self.draft.modules() if isinstance(module, nn.Linear)]
        counts = range(1, most + 1)
        if self.int8:
            install_int8(linears)
        elif kernels == "auto":
            install(linears, fastest_kernels(linears, counts))
        else:
            install(linears, dict.fromkeys(counts, kernels))
        return linears

    def fuse(self, taps_1RA: Tensor) -> Tensor:
        return self.draft.fuse(taps_1RA.to(self.cache.dtype))

    def feedback(self, hidden_1RH: Tensor) -> Tensor:
        return self.draft.feedback(hidden_1RH)

    def chain(self, state_1RH: Tensor, ids: Sequence[int], start: int, last: int = 1) -> Tensor:
        self.cache.begin(start, len(ids), by_position=False)
        return self._forward(state_1RH, ids, range(start, start + len(ids)))[:, -last:]

    def tree(self, state_1RH: Tensor, ids: Sequence[int], start: int, parents: Sequence[int]) -> Tensor:
        self.cache.begin_tree(start, parents, len(ids))
        return self._forward(state_1RH, ids, [start + depth for depth in depths(parents)[-len(ids) :]])

    def logits(self, hidden_1RH: Tensor) -> Tensor:
        return self.draft.logits(hidden_1RH)

    def _forward(self, state_1RH: Tensor, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        device = state_1RH.device
        self.positions = list(positions)
        rope = self.draft.rope(torch.tensor([self.positions], device=device))
        return self.draft(torch.tensor([list(ids)], device=device), state_1RH, rope, self._attend)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.cache.attend(layer, query, key, value, window=self.draft.config.sliding_window)


class NativeDraft:
    """By native.cpp."""

    def __init__(self, draft: Draft, library: ctypes.CDLL, *, int8: bool = False) -> None:
        self.draft = draft
        self.cache = KVCache(torch.bfloat16 if int8 else draft.fc.weight.dtype)
        self.positions: list[int] = []
        others = [draft.lm_head, draft.fc]
        self.decoder = Decoder(library, draft_parts(draft), self.cache.dtype, self._rope, others, int8)
        self.head, self.fc = self.decoder.others

    def fork(self) -> "NativeDraft":
        forked = copy(self)
        forked.cache, forked.positions = KVCache(self.cache.dtype), []
        return forked

    @property
    def weight_bytes(self) -> int:
        """What a drafted token reads."""
        return self.decoder.weight_bytes + self.head.nbytes

    def settle(self, most: int, kernels: str) -> list[nn.Linear]:
        return []

    def fuse(self, taps_1RA: Tensor) -> Tensor:
        return self.fc(self.draft.before_fc(taps_1RA.float()))

    def feedback(self, hidden_1RH: Tensor) -> Tensor:
        return self.decoder.norm(hidden_1RH) if self.draft.config.norm_output else hidden_1RH

    def chain(self, state_1RH: Tensor, ids: Sequence[int], start: int, last: int = 1) -> Tensor:
        self.positions = list(range(start, start + len(ids)))
        rows = [TextRows(self.cache, ids, start)]
        prompt = len(ids) > PROMPT_ROWS
        return self.decoder.run(rows, state_1RH, prompt=prompt, last_only=last == 1).last[:, -last:]

    def tree(self, state_1RH: Tensor, ids: Sequence[int], start: int, parents: Sequence[int]) -> Tensor:
        self.positions = [start + depth for depth in depths(parents)[-len(ids) :]]
        return self.decoder.run([TextRows(self.cache, ids, start, parents)], state_1RH).last

    def logits(self, hidden_1RH: Tensor) -> Tensor:
        return self.head(self.decoder.norm(hidden_1RH))

    def _rope(self, positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.draft.rotary(torch.zeros(1), torch.arange(positions)[None])
        return cos[0].float().contiguous(), sin[0].float().contiguous()


BLOCKS = ("llama", "qwen3")
PROMPT_ROWS = 16
"""Rows from which native.cpp's product for prompts is the faster."""


def draft_forward(draft: Draft, forward: Forward, int8: bool = False) -> DraftForward:
    """Compiled where the target's forward is and the draft's shape allows; `int8` rounds the draft's weights.

    The plain path's int8 is the linears' own (engine/linear.py).
    """
    if isinstance(forward, NativeForward) and draft_unsupported(draft) is None:
        return NativeDraft(draft, forward.library, int8=int8)
    return PlainDraft(draft, int8=int8)


def draft_unsupported(draft: Draft) -> str | None:
    """Why native.cpp cannot run this draft; None where it can."""
    if draft.config.block not in BLOCKS:
        return f"its block is {draft.config.block}"
    weights = {parameter.dtype for parameter in draft.parameters()}
    if draft.fc.weight.device.type != "cpu" or len(weights) > 1:
        return "the draft's weights are of mixed precision or not on the CPU"
    scaling = draft.config.rope_scaling or {}
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    return None if rope in STATIC_ROPE else f"its rope is {rope}"


def draft_parts(draft: Draft) -> DecoderParts:
    """The draft's modules by native.cpp's names."""
    config = draft.config
    return DecoderParts(
        layers=[_layer(layer, draft) for layer in draft.layers],
        embedding=draft.embed_tokens.weight,
        final_norm=draft.norm.weight,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        width=config.head_dim,
        inner=config.intermediate_size,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        norm_before_residual=config.norm_before_residual,
    )


def _layer(layer: Any, draft: Draft) -> LayerParts:
    attention, mlp = layer.self_attn, layer.mlp
    modules = {name: getattr(attention, f"{name}_proj") for name in ("q", "k", "v", "o")}
    modules |= {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}
    norms = {"input_norm": layer.input_layernorm.weight, "post_norm": layer.post_attention_layernorm.weight}
    if layer.first:
        norms["hidden_norm"] = layer.hidden_norm.weight
    if draft.config.block == "qwen3":
        norms |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
    return LayerParts(modules, norms, draft.config.sliding_window or 0)
