"""The target's forward by native.cpp, for decoders of Llama's shape; engine/forward.py's plain path is its oracle.

Shapes: R rows, H hidden, A width of the concatenated taps, V vocabulary, P path.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.engine.cache import KVCache, branching
from eyas.engine.forward import PREFILL_ROWS
from eyas.engine.native import Decoder, DecoderParts, LayerParts, Rows
from eyas.engine.rows import Lanes, TextRows
from eyas.formats.taps import check_boundaries
from eyas.models.target import Target

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
CACHE_DTYPES = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16}


def unsupported(target: Target) -> str | None:
    """Why native.cpp cannot run this target; None where it can."""
    config, model = target.config, target.model
    if (reason := unsupported_config(config)) is not None:
        return reason
    if model.device.type != "cpu":
        return f"the target is on {model.device.type}"
    if target.dtype not in CACHE_DTYPES or any(p.dtype != target.dtype for p in target.backbone.parameters()):
        return "weights of mixed precision"
    return None


def unsupported_config(config: Any) -> str | None:
    """The same, as far as a target's config tells."""
    if config.model_type not in MODEL_TYPES:
        return f"{config.model_type} is none of {', '.join(MODEL_TYPES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        return f"its rope is {rope}, which changes with the text's length"
    return None


class NativeForward:
    """As TargetForward, over the target's own weights; needs no row bucket, so `rows` stays None."""

    rolls_back, grain, reason = True, 1, ""

    def __init__(
        self, target: Target, library: ctypes.CDLL, boundaries: Sequence[int] = (), *, int8: bool = False
    ) -> None:
        if boundaries:
            check_boundaries(boundaries, target.num_hidden_layers, where="the draft's taps")
        self.target, self.boundaries, self.library = target, tuple(boundaries), library
        self.rows: int | None = None
        self.together: int | None = None
        self.cache = KVCache(torch.bfloat16 if int8 else target.dtype)
        self.decoder = Decoder(library, decoder_parts(target), self.cache.dtype, self._rope, [target.head], int8)
        self.head = self.decoder.others[0]
        self._rows: Rows | None = None
        self._start, self._tree = 0, False

    @property
    def weight_bytes(self) -> int:
        """What a step of one row reads."""
        return self.decoder.weight_bytes + self.head.nbytes

    def close(self) -> None:
        """Nothing of the target was exchanged."""

    def prefill(self, ids: Sequence[int], start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Fill the cache with a prompt, from `start` on (TargetForward.prefill), which may be anywhere here: a row has
        the same bits in every chunk."""
        taps = []
        for first in range(start, len(ids), PREFILL_ROWS):
            self._run(ids[first : first + PREFILL_ROWS], first, prompt=True)
            taps.append(self.taps())
        assert self._rows is not None, "a prompt has at least one token"
        return self._rows.normed[:, -1:], torch.cat(taps, dim=1) if self.boundaries else None

    def verify(self, ids: Sequence[int], start: int, parents: Sequence[int] | None = None) -> Tensor:
        """Final-normed states [1, R, H] of a chain, or of a tree (TargetForward.verify)."""
        return self._run(ids, start, branching(parents))

    def verify_texts(self, texts: Sequence[TextRows]) -> Lanes:
        """All in one forward: the weights are read once for all."""
        rows = self.decoder.run(texts, boundaries=self.boundaries)
        sizes = [len(text.ids) for text in texts]
        logits = self.target.scaled(self.head(rows.normed))[0].split(sizes)
        for text, logits_RV, taps in zip(texts, logits, rows.taps.split(sizes, dim=1), strict=True):
            yield logits_RV, _Part(text, taps)

    def keep(self, path: Sequence[int]) -> None:
        """Rows `path` of the latest verify, ascending from 0, stand at start, start + 1, ..."""
        if self._tree:
            keep_rows(self.cache, self._start, path)

    def logits(self, normed_BRH: Tensor) -> Tensor:
        """float32 logits [R, V]."""
        return self.target.scaled(self.head(normed_BRH))[0]

    def state(self, boundary: int) -> Tensor:
        """One tapped boundary [1, R, H] of the latest forward."""
        assert self._rows is not None, "a forward comes first"
        return self._rows.taps[:, :, self.boundaries.index(boundary)]

    def taps(self, path: Sequence[int] | None = None) -> Tensor:
        """Concatenated taps [1, R, A] of the latest forward, ascending boundaries; [1, P, A] of its rows `path`."""
        assert self._rows is not None, "a forward comes first"
        taps = self._rows.taps if path is None else self._rows.taps[:, list(path)]
        return taps.flatten(2)

    def _run(
        self, ids: Sequence[int], start: int, parents: Sequence[int] | None = None, *, prompt: bool = False
    ) -> Tensor:
        self._start, self._tree = start, parents is not None
        self._rows = self.decoder.run(
            [TextRows(self.cache, ids, start, parents)], boundaries=self.boundaries, prompt=prompt
        )
        return self._rows.normed

    def _rope(self, positions: int) -> tuple[Tensor, Tensor]:
        rotary: Any = self.target.backbone.rotary_emb
        cos, sin = rotary(torch.zeros(1), torch.arange(positions)[None])
        return cos[0].float().contiguous(), sin[0].float().contiguous()


@dataclass(frozen=True)
class _Part:
    """One text's rows of a forward; `states` [1, R, boundaries, H]."""

    text: TextRows
    states: Tensor

    def keep(self, path: Sequence[int]) -> None:
        if self.text.parents is not None:
            keep_rows(self.text.cache, self.text.start, path)

    def taps(self, path: Sequence[int] | None = None) -> Tensor:
        whole = path is None or len(path) == self.states.shape[1]
        # A copy, for a text may keep them long after the others' rows beside them are done with.
        return (self.states.clone() if whole else self.states[:, list(path)]).flatten(2)


def keep_rows(cache: KVCache, start: int, path: Sequence[int]) -> None:
    """Move a tree's rows that stand from their slots to start, start + 1, ..."""
    moved = [(row, place) for place, row in enumerate(path) if row != place]
    for buffer in (*cache.keys.values(), *cache.values.values()):
        for row, place in moved:  # ascending, so that no row is overwritten before it is moved
            buffer[:, :, start + place] = buffer[:, :, start + row]


def decoder_parts(target: Target) -> DecoderParts:
    """The target's modules by native.cpp's names."""
    config, layers = target.config, [_layer(layer, target) for layer in target.layers]
    first: Any = target.layers[0]
    norm: Any = target.final_norm
    return DecoderParts(
        layers=layers,
        embedding=target.embedding,
        final_norm=norm.weight,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        width=first.self_attn.head_dim,
        inner=config.intermediate_size,
        eps=config.rms_norm_eps,
        scale=first.self_attn.scaling,
    )


def _layer(layer: Any, target: Target) -> LayerParts:
    attention, mlp = layer.self_attn, layer.mlp
    modules = {name: getattr(attention, f"{name}_proj") for name in ("q", "k", "v", "o")}
    modules |= {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}
    norms = {"input_norm": layer.input_layernorm.weight, "post_norm": layer.post_attention_layernorm.weight}
    if target.config.model_type == "qwen3":
        norms |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
    mistral = target.config.model_type == "mistral"
    window = getattr(target.config if mistral else attention, "sliding_window", None)
    return LayerParts(modules, norms, window or 0)
