"""Every shape a draft can have: training equals decoding, later layers are transformers' own, faults are seen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from eyas.models.draft import Draft
from eyas.wiring.parity import ttt_equals_incremental
from test_loss import HIDDEN, VOCAB, make_draft

flags = st.fixed_dictionaries(
    {
        "block": st.sampled_from(["llama", "qwen3"]),
        "num_hidden_layers": st.integers(1, 3),
        "sliding_window": st.sampled_from([None, 3, 6]),
        "norms": st.sampled_from([(False, False), (True, False), (False, True)]),
        "norm_output": st.booleans(),
        "norm_before_residual": st.booleans(),
        "attention_bias": st.booleans(),
        "fc_bias": st.booleans(),
    }
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(flags)
def test_any_combination_of_options_trains_what_it_decodes(options: dict[str, object]) -> None:
    fc_norm, norm_before_fc = options.pop("norms")  # type: ignore[misc]
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

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with torch.no_grad():
        wanted = theirs(state, attention_mask=causal, position_embeddings=rope)
        got = ours(torch.empty(0), state, rope, attend)
    torch.testing.assert_close(got, wanted[0] if isinstance(wanted, tuple) else wanted, atol=1e-5, rtol=1e-5)


def test_parity_sees_training_and_decoding_part(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = make_draft()
    taps_TA, ids_T = torch.randn(12, 2 * HIDDEN), torch.randint(0, VOCAB, (12,))
    taken = []

    def feedback(self: Draft, hidden: Tensor) -> Tensor:
        taken.append(hidden.shape)
        return self.norm(hidden) if len(taken) > 2 else hidden  # the TTT forward asks first, once a step

    monkeypatch.setattr(Draft, "feedback", feedback)
    assert ttt_equals_incremental(draft, taps_TA, ids_T) > 1e-3
