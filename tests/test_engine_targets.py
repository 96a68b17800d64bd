"""The engine runs other architectures through transformers' own modules; for those that keep a state nothing drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DiffLlamaConfig,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from eyas.engine.batching import Job, Scheduler
from eyas.engine.generate import Engine
from eyas.errors import InputError
from eyas.formats.draft_config import TargetIdentity
from eyas.models.target import Target
from eyas.settings import DraftingSettings
from test_batching import Listener
from tiny import tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "bos_token_id": 1,
}
ALIBI: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = GPT2Config(vocab_size=259, n_positions=512, n_embd=32, n_layer=4, n_head=4, eos_token_id=2, bos_token_id=1)
OPT = OPTConfig(
    vocab_size=259,
    hidden_size=32,
    num_hidden_layers=4,
    ffn_dim=48,
    num_attention_heads=4,
    max_position_embeddings=512,
    word_embed_proj_dim=32,
)
KNOWN = [
    GPT2,  # no linear layers but modules of its own
    OPT,
    StableLmConfig(**SHAPE),  # hands no keyword of the forward on to its attention
    Qwen3Config(**SHAPE),
    MistralConfig(**SHAPE, sliding_window=7),
    Gemma3TextConfig(**SHAPE, sliding_window=7, layer_types=["sliding_attention", "full_attention"] * 2),
    GraniteConfig(**SHAPE, logits_scaling=3.0, attention_multiplier=0.2),
    Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    Gemma2Config(**SHAPE, sliding_window=7, attn_logit_softcapping=2.0),
    GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=7),
    FalconConfig(**ALIBI, num_attention_heads=4, num_hidden_layers=4, max_position_embeddings=512, alibi=True),
    BloomConfig(**ALIBI, n_head=4, n_layer=4, seq_length=512),
    Llama4TextConfig(**SHAPE, intermediate_size_mlp=48, num_local_experts=4, attention_chunk_size=16, floor_scale=9),
]


def target_of(config: PreTrainedConfig) -> Target:
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.25)
    identity = TargetIdentity(
        name=config.model_type,
        weights_hash="",
        model_type=config.model_type,
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )
    return Target(model, tiny_tokenizer(), Path(), identity, torch.float32)


@pytest.mark.parametrize("config", KNOWN, ids=lambda config: config.model_type)
def test_rows_and_texts_are_those_of_the_architectures_own_forward(config: PreTrainedConfig) -> None:
    target = target_of(config)
    prompt = torch.randint(3, 259, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    engine = Engine(target, num_steps=3, kernels="torch", announce=False)
    assert engine.facts.lossless
    text = list(engine.generate(prompt, 24, ignore_eos=True).ids)
    with torch.inference_mode():
        engine.forward.cache.reserve(80)
        engine.forward.prefill(prompt[:20])
        rows = torch.cat([engine.forward.logits(engine.forward.verify(prompt[i : i + 4], i)) for i in range(20, 40, 4)])
        engine.close()
        logits = target.model(torch.tensor([[*prompt, *text]])).logits[0]
    torch.testing.assert_close(rows, logits[20:40], atol=1e-3, rtol=1e-3)
    assert text == logits[39:-1].argmax(-1).tolist()


STATES = [
    Lfm2Config(**SHAPE, layer_types=["conv", "full_attention", "conv", "full_attention"]),
    MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=4, state_size=8),
    FalconH1Config(**SHAPE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
]


@pytest.mark.parametrize("config", STATES, ids=lambda config: config.model_type)
def test_a_target_that_keeps_a_state_decodes_and_is_not_drafted_for(config: PreTrainedConfig) -> None:
    target = target_of(config)
    own = target.model.config._attn_implementation
    with pytest.raises(InputError, match="past can be rolled back, to draft for it"):
        Engine(target, drafting=DraftingSettings(ngram=3), announce=False)
    assert target.model.config._attn_implementation == own
    engine = Engine(target, announce=False)
    assert "nothing can be drafted" in engine.facts.describe()
    assert [len(engine.generate([5, 6, 7], count, ignore_eos=True).ids) for count in (1, 9)] == [1, 9]
    engine.close()


def test_attention_in_two_parts_a_layer_runs_by_its_own_code() -> None:
    """Every layer attends through the interface, and yet rows behind a cached prompt are wrong: only the target's own
    forward tells."""
    target = target_of(DiffLlamaConfig(**SHAPE))
    own = target.model.config._attn_implementation
    engine = Engine(target, announce=False)
    assert engine.facts.path == "own attention"
    assert "off its own forward's by" in engine.facts.why
    engine.close()
    assert target.model.config._attn_implementation == own


def test_experts_are_given_back() -> None:
    target = target_of(Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))
    own = target.model.config._experts_implementation
    engine = Engine(target, announce=False)
    assert target.model.config._experts_implementation == "eyas"
    engine.close()
    assert target.model.config._experts_implementation == own


def test_two_texts_of_a_state_take_turns() -> None:
    """The state is the text's, not the engine's."""
    engine = Engine(target_of(STATES[1]), announce=False)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    alone = [list(engine.generate(prompt, 8, ignore_eos=True).ids) for prompt in prompts]
    readers = [Listener(), Listener()]
    scheduler = Scheduler(engine, cache_rows=2048, most=2)
    for prompt, reader in zip(prompts, readers, strict=True):
        scheduler.submit(Job(tuple(prompt), 8, reader, ignore_eos=True))
    while not scheduler.idle:
        scheduler.step()
    assert [reader.ids for reader in readers] == alone
    engine.close()


def test_a_target_without_a_context_length_is_refused() -> None:
    target = target_of(BloomConfig(**ALIBI, n_layer=2, n_head=4))
    with pytest.raises(InputError, match="max_position_embeddings"):
        Engine(target, announce=False)


@pytest.mark.parametrize("config", [OPT, GPT2], ids=lambda config: config.model_type)
def test_learned_positions_end_with_the_context_and_not_in_an_error(config: PreTrainedConfig) -> None:
    """The rows of a round that padding or drafting puts beyond the last position stand at it."""
    engine = Engine(target_of(config), drafting=DraftingSettings(num_steps=4, ngram=3), announce=False)
    prompt = [5, 6, 7, 8] * 126
    texts = [engine.generate(prompt, 50, num_steps, ignore_eos=True) for num_steps in (0, 4)]
    assert [(len(text.ids), text.finish) for text in texts] == [(8, "context")] * 2
    assert texts[0].ids == texts[1].ids
    engine.close()


def test_int8_is_refused_where_there_is_nothing_to_round() -> None:
    falcon = FalconConfig(**ALIBI, num_attention_heads=4, num_hidden_layers=4, max_position_embeddings=512)
    for config, name in ((GPT2, "GPT2LMHeadModel"), (falcon, "FalconForCausalLM")):
        with pytest.raises(InputError, match=f"none in the layers of {name}, which multiply by modules of their own"):
            Engine(target_of(config), int8=True, announce=False)
