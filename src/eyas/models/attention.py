"""The draft's attention modules: grouped-query (Llama, Qwen3) and multi-head latent (DeepSeek's MLA).

Each makes queries, keys and values; attending is the caller's, through `Attend`, so that one module trains and serves.

Source: transformers 5 modeling_deepseek_v3.py and, for where a draft differs from a target (the doubled input, one
epsilon for every norm), SGLang 0.5.23 models/kimi_k25_eagle3.py and vLLM 0.33 deepseek_eagle3.py.

Shapes: B batch, T rows, I the input's width (2H in the first layer), H hidden, N query heads, K key/value heads,
E width of a query and a key, U width of a value (E but in latent attention), P the rotated part of E (E but in latent
attention), C width of the latent that keys and values share.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave, yarn_apply_mscale

from eyas.formats.draft_config import DraftConfig, LatentShape
from eyas.models.fused import Doubled, RMSNorm, Wide, rotated

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query_BNTE, key_BKTE, value_BKTU), rope applied, to context_BNTU, scores scaled by E ** -0.5. The caller owns
mask and cache: training passes the TTT attention, the engine its cache, so that both run this one module."""

Rope = tuple[Tensor, Tensor]
"""cos and sin [B, T, P] of the rows' rotary positions."""


def rope_parameters(config: DraftConfig) -> dict[str, Any]:
    """The draft's rotary settings as transformers 5 spells them."""
    return {"rope_type": "default", "rope_theta": config.rope_theta, **(config.rope_scaling or {})}


class Attention(nn.Module):
    """What the two have in common: a row's output is `o_proj` of its context over everyone's keys and values."""

    layer: int
    o_proj: nn.Linear

    @abstractmethod
    def query(self, x_BTI: Tensor | Doubled, rope: Rope) -> Tensor:
        """Query heads [B, N, T, E], rope applied."""

    @abstractmethod
    def key_value(self, x_BTI: Tensor | Doubled, rope: Rope) -> tuple[Tensor, Tensor]:
        """Key heads [B, K, T, E], rope applied, and value heads [B, K, T, U]."""

    def forward(self, x_BTI: Tensor | Doubled, rope: Rope, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Keys and values of every row; queries, and so an output, of `rows` only (None: of all)."""
        key, value = self.key_value(x_BTI, rope)
        if rows is not None:
            rope = rope[0][:, rows], rope[1][:, rows]
            x_BTI = x_BTI.rows(rows) if isinstance(x_BTI, Doubled) else x_BTI[:, rows]
        context = attend(self.layer, self.query(x_BTI, rope), key, value)
        return self.o_proj(context.transpose(1, 2).flatten(2))


def _input_of(config: DraftConfig, layer: int) -> tuple[int, type[nn.Linear]]:
    """How wide a layer's input is, and what projects it."""
    return (2 * config.hidden_size, Wide) if layer == 0 else (config.hidden_size, nn.Linear)


class GroupedAttention(Attention):
    """Grouped-query attention whose input may be wider than its output (2H in the first layer)."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width, made = _input_of(config, layer)
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = made(width, heads * config.head_dim, bias=bias)
        self.k_proj = made(width, kv_heads * config.head_dim, bias=bias)
        self.v_proj = made(width, kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias=bias and config.block == "llama")
        qk_norm = config.block == "qwen3"
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()

    def query(self, x_BTI: Tensor | Doubled, rope: Rope) -> Tensor:
        heads = self.q_norm(self.q_proj(x_BTI).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return rotated(heads, *rope)

    def key_value(self, x_BTI: Tensor | Doubled, rope: Rope) -> tuple[Tensor, Tensor]:
        key = self.k_norm(self.k_proj(x_BTI).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        value = self.v_proj(x_BTI).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return rotated(key, *rope), value


class LatentAttention(Attention):
    """Multi-head latent attention: queries, and keys with values, pass through narrow normed latents; one rotated part
    is shared by all key heads. Keys and values are spread out to heads, as in a prefill; nothing is absorbed.

    The rotated parts are interleaved pairs, and the norms of the latents take the draft's own epsilon, as both engines
    do (transformers: 1e-6 whatever the config).
    """

    def __init__(self, config: DraftConfig, latent: LatentShape, layer: int) -> None:
        super().__init__()
        self.layer, self.shape, self.heads = layer, latent, config.num_attention_heads
        (width, made), eps = _input_of(config, layer), config.rms_norm_eps
        spread = latent.qk_nope_head_dim + latent.v_head_dim
        self.q_a_proj = made(width, latent.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(latent.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(latent.q_lora_rank, self.heads * latent.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = made(width, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(latent.kv_lora_rank, self.heads * spread, bias=False)
        self.o_proj = nn.Linear(self.heads * latent.v_head_dim, config.hidden_size, bias=False)
        self.stretch: float = yarn_apply_mscale(rope_parameters(config), 1.0)
        """YaRN's mscale_all_dim on the softmax scale, which multiplies queries so that `Attend` need not know of it."""

    def query(self, x_BTI: Tensor | Doubled, rope: Rope) -> Tensor:
        heads = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTI)))
        heads_BNTE = heads.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        plain, rotated = heads_BNTE.split([self.shape.qk_nope_head_dim, self.shape.qk_rope_head_dim], dim=-1)
        query = torch.cat([plain, _rotate_pairs(rotated, rope)], dim=-1)
        return query if self.stretch == 1.0 else query * self.stretch

    def key_value(self, x_BTI: Tensor | Doubled, rope: Rope) -> tuple[Tensor, Tensor]:
        shape = self.shape
        latent_BTC, rotated_BTP = self.kv_a_proj_with_mqa(x_BTI).split(
            [shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1
        )
        spread = self.kv_b_proj(self.kv_a_layernorm(latent_BTC)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        plain, value = spread.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
        shared = _rotate_pairs(rotated_BTP[:, None], rope).expand(-1, self.heads, -1, -1)
        return torch.cat([plain, shared], dim=-1), value


def _rotate_pairs(states_BNTP: Tensor, rope: Rope) -> Tensor:
    return apply_rotary_pos_emb_interleave(states_BNTP, states_BNTP[:, :0], *rope)[0]


def attention(config: DraftConfig, layer: int) -> Attention:
    """The attention of the draft's block."""
    if config.latent is None:
        return GroupedAttention(config, layer)
    return LatentAttention(config, config.latent, layer)
