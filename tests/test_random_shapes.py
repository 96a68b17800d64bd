"""Whatever the decoder's shape, however it is drafted for: the drafted text is the plain text.

The slow proof tries one target at length; this tries many shapes, each a little.
"""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from eyas.engine.costs import RoundCosts
from eyas.engine.generate import Engine
from eyas.formats.draft_config import DraftConfig
from eyas.models.draft import Draft
from eyas.models.target import Target
from eyas.settings import DraftingSettings, SamplingSettings
from replay import BranchingProposer, ReplayProposer
from test_native import target_of

COSTS = RoundCosts({depth: 1 + 0.1 * depth for depth in range(6)}, {depth: 1 + 0.05 * depth for depth in range(6)})
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"topk": 3, "num_draft_tokens": 8},
    "ngram": {"ngram": 3},
    "adaptive": {"adaptive": True},
    "all": {"topk": 2, "num_draft_tokens": 6, "ngram": 3, "adaptive": True},
    "right by turns": {},
    "branches right by turns": {"topk": 3, "num_draft_tokens": 16},
}
SAMPLED = SamplingSettings(
    temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.4, seed=5
)


def drafting_of(num_steps: int, topk: int = 1, num_draft_tokens: int | None = None, **more: Any) -> DraftingSettings:
    """A tree of as many tokens, or of all that so few levels have."""
    most = 1 + topk + (num_steps - 1) * topk**2
    size = None if num_draft_tokens is None else min(num_draft_tokens, most)
    return DraftingSettings(num_steps=num_steps, topk=topk, num_draft_tokens=size, **more)


def random_config(r: random.Random) -> PreTrainedConfig:
    groups = r.choice([1, 1, 2, 3])
    heads = groups * r.choice([1, 2, 3, 5])
    layers = r.choice([3, 4, 5])
    kinds = [r.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    shape: dict[str, Any] = {
        "vocab_size": r.choice([259, 300, 517]),
        "hidden_size": heads * r.choice([6, 11, 16, 32]),
        "intermediate_size": r.choice([17, 40, 100, 129]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": r.choice([8, 12, 16, 20, 40, 64, 80, 96, 128]),
        "max_position_embeddings": r.choice([128, 512]),
        "tie_word_embeddings": r.random() < 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    window = r.choice([3, 7, 40])
    return r.choice(
        [
            lambda: LlamaConfig(**shape, attention_bias=r.random() < 0.5, mlp_bias=r.random() < 0.5),
            lambda: MistralConfig(**shape, sliding_window=r.choice([None, window])),
            lambda: Qwen2Config(**shape, sliding_window=window, use_sliding_window=True, layer_types=kinds),
            lambda: Qwen3Config(**shape, attention_bias=r.random() < 0.5),
        ]
    )()


def random_draft(target: Target, r: random.Random) -> Draft:
    torch.manual_seed(r.randrange(1000))
    heads = next(count for count in (6, 4, 3, 2, 1) if target.hidden_size % count == 0)
    return Draft(
        DraftConfig(
            boundaries=(1, 2, 3),
            target_num_hidden_layers=target.num_hidden_layers,
            target_hidden_size=target.hidden_size,
            target_model_type=target.config.model_type,
            hidden_size=target.hidden_size,
            intermediate_size=60,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2) if heads != 3 else 1,
            head_dim=r.choice([8, 20]),
            vocab_size=target.vocab_size,
            draft_vocab_size=r.choice([100, 259]),
            max_position_embeddings=512,
            block=r.choice(["llama", "qwen3"]),
            sliding_window=r.choice([None, 5]),
        )
    )


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), way=st.sampled_from(sorted(WAYS)), precision=st.sampled_from([0, 1, 2]))
def test_a_drafted_text_is_the_plain_text_whatever_the_shape(kernels: str, seed: int, way: str, precision: int) -> None:
    r = random.Random(seed)
    target = target_of(random_config(r), torch.bfloat16 if precision else torch.float32)
    num_steps, sampling = r.choice([1, 2, 3, 5]), r.choice([SamplingSettings(), SAMPLED])
    engine = Engine(
        target,
        random_draft(target, r),
        drafting=drafting_of(num_steps, **WAYS[way]),
        kernels=kernels,
        int8=precision == 2,
        draft_int8=r.random() < 0.3,
        draft_dtype=r.choice([None, torch.float32, torch.bfloat16]),
        costs=COSTS,
        announce=False,
    )
    length = r.choice([1, 2, 17, 60, 124] if target.context_length == 128 else [1, 3, 30, 245, 490])
    motif = [r.randrange(3, 259) for _ in range(min(length, r.choice([5, 500])))]
    prompt, limit = (motif * length)[:length], r.choice([2, 20, 30])
    plain = engine.generate(prompt, limit, 0, ignore_eos=True, sampling=sampling)
    if way.endswith("turns"):
        stub, period = (BranchingProposer if "branches" in way else ReplayProposer), r.choice([2, 3, 4])
        engine.proposer = stub(plain.ids, length, target.vocab_size, lambda index: index % period == 0)
    drafted = engine.generate(prompt, limit, num_steps, ignore_eos=True, sampling=sampling)
    engine.close()
    # Linears whose widths no vector divides: the plain path says at start that its rows have no bits of their own.
    assert engine.facts.lossless or engine.facts.path == "plain"
    if engine.facts.lossless:
        assert (drafted.ids, drafted.finish) == (plain.ids, plain.finish)
