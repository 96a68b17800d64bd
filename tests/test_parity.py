"""Every shape a draft can have: training equals decoding, later layers are transformers' own, faults are seen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from eyas.models.draft import Draft
from eyas.wiring.parity import ttt_equals_incremental
from test_loss import HIDDEN, LATENT, MLA, PEAGLE, VOCAB, make_draft

flags = st.fixed_dictionaries(
    {
        "block": st.sampled_from(["llama", "qwen3", "mla"]),
        "num_hidden_layers": st.integers(1, 3),
        "sliding_window": st.sampled_from([None, 3, 6]),
        "norms": st.sampled_from([(False, False), (True, False), (False, True)]),
        "feedback": st.sampled_from([{}, {"norm_output": True}, PEAGLE]),
        "norm_before_residual": st.booleans(),
        "attention_bias": st.booleans(),
        "fc_bias": st.booleans(),
    }
)


YARN = {
    **{"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16},
    **{"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
"""Kimi-K2's scaling, for a shorter text."""


@settings(max_examples=40, deadline=None, derandomize=True)
@given(flags)
def test_any_combination_of_options_trains_what_it_decodes(options: dict[str, object]) -> None:
    fc_norm, norm_before_fc = options.pop("norms")  # type: ignore[misc]
    options |= options.pop("feedback")  # type: ignore[operator]
    if options["block"] == "mla":
        options |= {**MLA, "attention_bias": False, "rope_scaling": YARN}
    torch.manual_seed(0)
    draft = make_draft(fc_norm=fc_norm, norm_before_fc=norm_before_fc, **options)
    taps_TA, ids_T = torch.randn(12, 2 * HIDDEN), torch.randint(0, VOCAB, (12,))
    assert ttt_equals_incremental(draft, taps_TA, ids_T) < 1e-5


@pytest.mark.parametrize(
    ("block", "config_class", "layer_class"),
    [("llama", LlamaConfig, LlamaDecoderLayer), ("qwen3", Qwen3Config, Qwen3DecoderLayer)],
)
def test_a_later_layer_is_transformers_own(block: str, config_class: type, layer_class: type) -> None:
    draft = make_draft(block=block, num_hidden_layers=2)
    ours, config = draft.layers[1], draft.config
    theirs_config = config_class(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        attn_implementation="eager",
    )
    theirs = layer_class(theirs_config, layer_idx=0).eval()
    theirs.load_state_dict(ours.state_dict())
    state, rope = torch.randn(1, 9, HIDDEN), draft.rope(torch.arange(9)[None])
    causal = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        wanted = theirs(state, attention_mask=causal, position_embeddings=rope)
        got = ours(torch.empty(0), state, rope, attend_causally)
    torch.testing.assert_close(got, wanted[0] if isinstance(wanted, tuple) else wanted, atol=1e-5, rtol=1e-5)


def attend_causally(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("scaling", [None, YARN, YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}])
@pytest.mark.parametrize("layer", [0, 1])
def test_latent_attention_is_transformers_own(layer: int, scaling: dict[str, object] | None) -> None:
    """In the first layer over an input twice as wide, which transformers knows as a wider model."""
    draft = make_draft(**MLA, num_hidden_layers=2, rms_norm_eps=1e-6, rope_scaling=scaling, rope_theta=50_000.0)
    ours, width = draft.layers[layer].self_attn, HIDDEN * (1 if layer else 2)
    config = DeepseekV3Config(
        **LATENT.model_dump(),
        hidden_size=width,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0, **(scaling or {})},
        attn_implementation="eager",
    )
    theirs = DeepseekV3Attention(config, layer_idx=0).eval()
    theirs.o_proj = torch.nn.Linear(4 * LATENT.v_head_dim, HIDDEN, bias=False)
    theirs.load_state_dict(ours.state_dict())
    x, positions = torch.randn(1, 9, width), torch.arange(9)[None] + 20
    causal = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    rope = DeepseekV3RotaryEmbedding(config)(x, positions)
    with torch.no_grad():
        wanted = theirs(x, position_embeddings=rope, attention_mask=causal)[0]
        got = ours(x, draft.rope(positions), attend_causally)
    torch.testing.assert_close(draft.rope(positions), rope)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_parity_sees_training_and_decoding_part(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = make_draft()
    taps_TA, ids_T = torch.randn(12, 2 * HIDDEN), torch.randint(0, VOCAB, (12,))
    taken = []

    def feedback(self: Draft, hidden: Tensor) -> Tensor:
        taken.append(hidden.shape)
        return self.norm(hidden) if len(taken) > 2 else hidden  # the TTT forward asks first, once a step

    monkeypatch.setattr(Draft, "feedback", feedback)
    assert ttt_equals_incremental(draft, taps_TA, ids_T) > 1e-3
