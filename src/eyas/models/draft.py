"""The draft, whole: what is computed from taps and a token to the next token's logits.

Source: EAGLE-3 (arXiv 2503.01840); SGLang 0.5.23 models/llama_eagle3.py and vLLM 0.33 llama_eagle3.py for the names and
the options; EAGLE-3.1 (arXiv 2605.09992) for `fc_norm` and `norm_output`; P-EAGLE (formats/methods.py).

Shapes: B batch, T rows, A width of the concatenated taps, H hidden, D draft vocabulary, V target vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig
from eyas.formats.methods import MethodName
from eyas.models.attention import Attend, Rope, attention, rope_parameters
from eyas.models.fused import Doubled, RMSNorm, Tokens


def llama_config(config: DraftConfig) -> LlamaConfig:
    """The draft's block as transformers spells it (for its norm, MLP and rope modules).

    Raises InputError for a rope scaling of no known type, or that lacks a key of its type.
    """
    kind = rope_parameters(config)["rope_type"]
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise InputError(
            wanted=f"a rope_type that transformers has: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}",
            got=repr(kind),
            where="draft config: rope_scaling",
            next="write the type that the draft was trained with",
            code="rope_scaling",
        )
    try:
        return _llama_config(config)
    except KeyError as error:
        raise InputError(
            wanted="every key of the rope's type",
            got=str(error.args[0]),
            where="draft config: rope_scaling",
            next="write the keys that are missing (config.json: rope_scaling)",
        ) from error


def _llama_config(config: DraftConfig) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope_parameters(config),
        vocab_size=config.vocab_size,
    )


class Layer(nn.Module):
    """A decoder layer; the first one reads cat(norm(embedding), norm(state)) and keeps the state as residual."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.first, self.norm_before_residual = layer == 0, config.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        if self.first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = attention(config, layer)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = LlamaMLP(llama_config(config))

    def attention_input(self, embeds_BTH: Tensor | Doubled, state_BTH: Tensor) -> tuple[Tensor | Doubled, Tensor]:
        """The attention's input, [B, T, 2H] in the first layer, and the residual, [B, T, H]."""
        if not self.first:
            return self.input_layernorm(state_BTH), state_BTH
        normed = self.hidden_norm(state_BTH)
        residual = normed if self.norm_before_residual else state_BTH
        if isinstance(embeds_BTH, Doubled):
            return embeds_BTH.beside(normed), residual
        return torch.cat([self.input_layernorm(embeds_BTH), normed], dim=-1), residual

    def forward(
        self,
        embeds_BTH: Tensor | Doubled,
        state_BTH: Tensor,
        rope: Rope,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The new state [B, T, H]; of `rows` only where given, while every row leaves its key and value."""
        x, residual = self.attention_input(embeds_BTH, state_BTH)
        residual = residual if rows is None else residual[:, rows]
        state = residual + self.self_attn(x, rope, attend, rows)
        return state + self.mlp(self.post_attention_layernorm(state))


class Draft(nn.Module):
    """One autoregressive draft head over the target's taps.

    `embed_tokens` is the target's table, shared and frozen (`share_embedding`), unless `own_embedding`. `d2t` [D] is
    the offset table (target id = draft id + d2t[draft id]), `t2d` [V] the mask of the draft vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden, device=None if config.own_embedding else "meta")
        self.embed_tokens.weight.requires_grad_(config.own_embedding)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.taps_width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.boundaries)
        self.fc = nn.Linear(config.taps_width, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama_config(config))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Draft":
        """`.to(bfloat16)` must not round the rotary frequencies: they are made anew on the parameters' device."""
        super()._apply(fn, recurse)
        self.rotary = LlamaRotaryEmbedding(llama_config(self.config)).to(self.fc.weight.device)
        return self

    def share_embedding(self, weight_VH: Tensor) -> None:
        """Use the target's embedding table [V, H] (no copy, no gradient)."""
        wanted = (self.config.vocab_size, self.config.hidden_size)
        if tuple(weight_VH.shape) != wanted:
            raise InputError(
                wanted=f"a target embedding of shape {wanted}",
                got=str(tuple(weight_VH.shape)),
                where="the draft's embedding",
                next="use the target the draft was trained for (eyas inspect DRAFT names it)",
                code="shape_mismatch" if weight_VH.shape[1] != wanted[1] else "vocab_mismatch",
            )
        if not self.config.own_embedding:
            self.embed_tokens.weight = nn.Parameter(weight_VH.detach(), requires_grad=False)

    def before_fc(self, taps_BTA: Tensor) -> Tensor:
        """Concatenated taps, in ascending boundary order, to what `fc` is given [B, T, A]: the norms, if any."""
        if self.config.norm_before_fc:
            taps_BTA = self.input_norm(taps_BTA)
        if self.config.fc_norm:
            chunks = taps_BTA.split(self.config.target_hidden_size, dim=-1)
            taps_BTA = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return taps_BTA

    def fuse(self, taps_BTA: Tensor) -> Tensor:
        """Concatenated taps to the first step's state [B, T, H]."""
        return self.fc(self.before_fc(taps_BTA))

    def rope(self, positions_BT: Tensor) -> Rope:
        """cos and sin for rotary positions [B, T]."""
        return self.rotary(self.fc.weight, positions_BT)

    def forward(
        self, ids_BT: Tensor, state_BTH: Tensor, rope: Rope, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """One step. Row t holds the state of token t and the id of token t+1; returns h [B, T, H], before the norm.

        With `rows` (indices [R]) only those rows' h is computed, [B, R, H]: in the last layer the others give no more
        than their key and value, which is most of a prompt's cost saved. `attend` then gets R queries and T keys.
        """
        return self.step(self.embed_tokens(ids_BT), state_BTH, rope, attend, rows)

    def tokens(self, ids_L: Tensor, met_M: Tensor) -> Tokens:
        """A text's tokens for `step`, again and again: of its rows only `met_M` (ascending) are queried."""
        first = self.layers[0]
        assert isinstance(first, Layer), "a draft is made of draft layers"
        return Tokens(first.input_layernorm(self.embed_tokens(ids_L[None])), met_M)

    def step(
        self,
        embeds_BTH: Tensor | Doubled,
        state_BTH: Tensor,
        rope: Rope,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """`forward` with the rows' embeddings, or with a place each among `tokens`."""
        state = state_BTH
        for layer in self.layers[:-1]:
            state = layer(embeds_BTH, state, rope, attend)
        return self.layers[-1](embeds_BTH, state, rope, attend, rows)

    def feedback(self, hidden_BTH: Tensor) -> Tensor:
        """What the next step is fed: h, or norm(h) under `norm_output`."""
        return self.norm(hidden_BTH) if self.config.norm_output else hidden_BTH

    def fed(self, hidden_BTH: Tensor, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """State and ids that a chain's next rows are fed, given h of these and the tokens that follow."""
        return self.feedback(hidden_BTH), ids_BT

    def logits(self, hidden_BTH: Tensor) -> Tensor:
        """Draft-vocabulary logits [B, T, D] of a step's h."""
        return self.lm_head(self.norm(hidden_BTH))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids to the target's."""
        return draft_ids + self.d2t[draft_ids]


class ParallelDraft(Draft):
    """P-EAGLE: rows of tokens that are not known yet are fed placeholders in place of id and taps, so that all of a
    chain is drafted in one forward. Row t + s of a chain predicts token t + 2 + s from taps up to t alone.

    `mask_hidden` [1, 1, A] starts as noise of unit size (speculators 0.9.0 models/peagle/core.py).
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        assert config.mask_token_id is not None, "the config's own check"
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.taps_width))

    def mask_state(self) -> Tensor:
        """The state [1, 1, H] that stands for taps not known yet."""
        return self.fuse(self.mask_hidden)

    def fed(self, hidden_BTH: Tensor, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Placeholders: nothing of this step is known to the next."""
        return self.mask_state().expand_as(hidden_BTH), torch.full_like(ids_BT, self.mask_token_id)


MODULES: dict[MethodName, type[Draft]] = {"eagle3": Draft, "peagle": ParallelDraft}


def make_draft(config: DraftConfig) -> Draft:
    """A new module of the config's method, its weights drawn anew."""
    return MODULES[config.method](config)
