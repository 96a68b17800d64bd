"""Which architecture runs which path (docs/engine.md's table), and that on each the texts are the architecture's own.

Tiny random targets in float32: plain decoding against transformers' generate, then drafted texts against plain ones, by
an untrained draft and by one that is right by turns, in chains and in trees, across a border of attended lengths.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from eyas.engine.generate import Engine
from eyas.engine.propose import DraftProposer
from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig
from eyas.models.draft import Draft
from eyas.models.target import Target
from eyas.settings import DraftingSettings
from replay import BranchingProposer, ReplayProposer
from test_engine_targets import SHAPE, target_of

LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}
OLD: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
GPT: dict[str, Any] = {"vocab_size": 259, "n_positions": 512, "n_embd": 32, "n_layer": 4, "n_head": 4}
STATE: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
WINDOW = {"sliding_window": 100}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPE),
    "mistral": ("MistralConfig", SHAPE | WINDOW),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", SHAPE),
    "apertus": ("ApertusConfig", SHAPE),
    "arcee": ("ArceeConfig", SHAPE),
    "codegen": ("CodeGenConfig", GPT | {"rotary_dim": 4}),
    "cohere": ("CohereConfig", SHAPE),
    "cohere2": ("Cohere2Config", SHAPE | WINDOW),
    "deepseek_v3": (
        "DeepseekV3Config",
        SHAPE | EXPERTS | LATENT | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    ),
    "ernie4_5": ("Ernie4_5Config", SHAPE),
    "exaone4": ("Exaone4Config", SHAPE | WINDOW),
    "gemma": ("GemmaConfig", SHAPE),
    "gemma2": ("Gemma2Config", SHAPE | WINDOW | {"attn_logit_softcapping": 2.0}),
    "gemma3_text": ("Gemma3TextConfig", SHAPE | WINDOW),
    "glm": ("GlmConfig", SHAPE),
    "glm4": ("Glm4Config", SHAPE),
    "gpt2": ("GPT2Config", GPT),
    "gpt_bigcode": ("GPTBigCodeConfig", GPT),
    "gpt_neox": ("GPTNeoXConfig", OLD | LAYERS | {"intermediate_size": 48}),
    "gpt_oss": ("GptOssConfig", SHAPE | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gptj": ("GPTJConfig", GPT | {"rotary_dim": 4}),
    "granite": ("GraniteConfig", SHAPE | {"logits_scaling": 3.0, "attention_multiplier": 0.2}),
    "mixtral": ("MixtralConfig", SHAPE | {"num_local_experts": 4}),
    "nemotron": ("NemotronConfig", SHAPE),
    "olmo2": ("Olmo2Config", SHAPE),
    "opt": ("OPTConfig", OLD | LAYERS | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("PhiConfig", SHAPE),
    "phi3": ("Phi3Config", SHAPE),
    "qwen3_moe": ("Qwen3MoeConfig", SHAPE | EXPERTS | {"num_experts": 4}),
    "smollm3": ("SmolLM3Config", SHAPE),
    "stablelm": ("StableLmConfig", SHAPE),
    "starcoder2": ("Starcoder2Config", SHAPE),
    "bloom": ("BloomConfig", OLD | {"n_layer": 4, "n_head": 4, "seq_length": 512}),
    "diffllama": ("DiffLlamaConfig", SHAPE),
    "falcon": ("FalconConfig", OLD | LAYERS),
    "llama4_text": (
        "Llama4TextConfig",
        SHAPE | {"intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 64, "floor_scale": 100},
    ),
    "mpt": ("MptConfig", {"vocab_size": 259, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 512}),
    "falcon_h1": (
        "FalconH1Config",
        SHAPE | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        OLD
        | {"num_layers": 4, "num_heads": 4, "max_position_embeddings": 512, "window_size": 100}
        | {"attention_types": [[["global", "local"], 2]]},
    ),
    "jamba": (
        "JambaConfig",
        SHAPE | {"mamba_d_state": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "lfm2": ("Lfm2Config", SHAPE | {"layer_types": ["conv", "full_attention"] * 2}),
    "mamba": ("MambaConfig", STATE | {"state_size": 8}),
    "mamba2": ("Mamba2Config", STATE | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}),
    "qwen3_next": (
        "Qwen3NextConfig",
        SHAPE
        | EXPERTS
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "shared_expert_intermediate_size": 16}
        | {"num_experts": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "rwkv": ("RwkvConfig", STATE | {"context_length": 512}),
}
DOCS = Path(__file__).parents[1] / "docs" / "engine.md"
PROMPT, TOKENS = 248, 16


def documented() -> dict[str, str]:
    """Architecture to path, of docs/engine.md's table."""
    table = DOCS.read_text().split("<!-- architectures -->")[1].strip().split("\n\n")[0]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    return {name: path for path, names, _ in cells[2:] for name in names.split(", ")}


def config_of(name: str) -> PreTrainedConfig:
    kind, shape = ARCHITECTURES[name]
    return getattr(transformers, kind)(**shape)


def untrained_draft(target: Target) -> Draft:
    torch.manual_seed(5)
    return Draft(
        DraftConfig(
            boundaries=(1, 2, 3),
            target_num_hidden_layers=target.num_hidden_layers,
            target_hidden_size=target.hidden_size,
            target_model_type=target.config.model_type,
            hidden_size=target.hidden_size,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=target.vocab_size,
            draft_vocab_size=100,
            max_position_embeddings=512,
        )
    )


def test_every_architecture_of_the_docs_is_tried_and_every_one_tried_is_in_the_docs() -> None:
    assert documented().keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_texts_are_the_architectures_own_by_the_documented_path(name: str) -> None:
    target = target_of(config_of(name))
    path = documented()[name]
    prompt = torch.randint(3, 259, (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
    own = own_text(target, prompt)
    if path == "own state":
        engine = Engine(target, announce=False)
        assert (engine.facts.path, engine.facts.rows) == (path, None)
        assert list(engine.generate(prompt, TOKENS, ignore_eos=True).ids) == own
        assert list(engine.generate(prompt, TOKENS, ignore_eos=True).ids) == own, "a text leaves nothing behind"
        engine.close()
        for drafting in ({"draft": untrained_draft(target)}, {"drafting": DraftingSettings(ngram=3)}):
            with pytest.raises(InputError, match="past can be rolled back"):
                Engine(target, announce=False, **drafting)
        return
    tree = DraftingSettings(num_steps=3, topk=2, num_draft_tokens=8)
    engine = Engine(target, untrained_draft(target), drafting=tree, announce=False)
    assert (engine.facts.path, engine.facts.lossless) == (path, True)
    assert list(engine.generate(prompt, TOKENS, ignore_eos=True).ids) == own
    assert isinstance(engine.proposer, DraftProposer)
    untrained = [engine.proposer, DraftProposer(engine.proposer.forward)]
    by_turns = [
        kind(own, PROMPT, target.vocab_size, lambda i: i % 3 == 0) for kind in (BranchingProposer, ReplayProposer)
    ]
    for proposer in (*untrained, *by_turns):
        engine.proposer = proposer
        drafted = engine.generate(prompt, TOKENS, 3, ignore_eos=True)
        assert list(drafted.ids) == own
        assert max(drafted.rounds) > 0 or proposer in untrained
    engine.close()


@torch.inference_mode()
def own_text(target: Target, prompt: list[int]) -> list[int]:
    """transformers' greedy text."""
    ids = torch.tensor([prompt])
    target.model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # without a token that ends texts
    generation = transformers.GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)[
        0, PROMPT:
    ].tolist()
