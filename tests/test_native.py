"""The compiled forward: transformers' own forward is its oracle, bits its promise."""

import copy
import ctypes
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from eyas.engine import start as start_module
from eyas.engine.cache import leaf_paths, path_to
from eyas.engine.draft_forward import NativeDraft, PlainDraft
from eyas.engine.generate import Engine
from eyas.engine.int8 import dequantise, quantise
from eyas.engine.linear import int8_kernel, int8_product_works
from eyas.engine.native_build import load_native
from eyas.engine.native_forward import NativeForward, unsupported
from eyas.formats.draft_config import DraftConfig, TargetIdentity
from eyas.models.draft import Draft
from eyas.models.target import Target
from eyas.settings import DraftingSettings
from tiny import tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 42,  # no multiple of any vector: tails are summed too
    "intermediate_size": 108,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama, biases, llama3 rope": LlamaConfig(
        **SHAPE,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LLAMA3 | {"original_max_position_embeddings": 64},
    ),
    "mistral, window": MistralConfig(**SHAPE, sliding_window=7),
    "qwen2, windows": Qwen2Config(
        **SHAPE, sliding_window=7, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"] * 2
    ),
    "qwen3, wide heads": Qwen3Config(**SHAPE | {"head_dim": 64}),
}
PRECISIONS = ["float32", "bfloat16", "int8"]
BOUNDARIES = (0, 2, 4)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = load_native()
    if isinstance(found, str):
        pytest.skip(f"no compiled kernels here: {found}")
    return found


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def target_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Target:
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.2)
        parameter.data = parameter.data.to(dtype)
    identity = TargetIdentity(
        name=config.model_type,
        weights_hash="",
        model_type=config.model_type,
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )
    return Target(model, tiny_tokenizer(), Path(), identity, dtype)


def forward_of(library: ctypes.CDLL, config: PreTrainedConfig, precision: str = "float32") -> NativeForward:
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    return NativeForward(target_of(config, dtype), library, BOUNDARIES, int8=precision == "int8")


def random_ids(count: int, seed: int = 2) -> list[int]:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_and_taps_are_those_of_the_architectures_own_forward(library: ctypes.CDLL, name: str) -> None:
    ids = random_ids(40)
    forward = forward_of(library, CONFIGS[name])
    assert unsupported(forward.target) is None
    expected = forward.target.model(torch.tensor([ids]), output_hidden_states=True)
    forward.cache.reserve(64)
    last, taps = forward.prefill(ids[:20])
    torch.testing.assert_close(forward.logits(last)[0], expected.logits[0, 19], atol=1e-4, rtol=1e-4)
    rows, found = [], [taps]
    for start in range(20, 40, 5):
        rows.append(forward.logits(forward.verify(ids[start : start + 5], start)))
        found.append(forward.taps())
    torch.testing.assert_close(torch.cat(rows), expected.logits[0, 20:], atol=1e-4, rtol=1e-4)
    taps = torch.cat(found, dim=1).unflatten(-1, (3, -1))
    for index, boundary in enumerate(BOUNDARIES[:2]):
        torch.testing.assert_close(taps[:, :, index], expected.hidden_states[boundary], atol=1e-4, rtol=1e-4)
    normed = forward.target.final_norm(taps[:, :, 2])
    torch.testing.assert_close(normed, expected.hidden_states[4], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2, windows", "mistral, window"])
def test_a_prompt_in_parts_has_the_bits_of_the_whole_which_are_the_architectures_own_states(
    library: ctypes.CDLL, name: str
) -> None:
    """Longer than a block of values, by any number of threads."""
    config = copy.deepcopy(CONFIGS[name])
    config.max_position_embeddings = 1024
    forward, ids, threads = forward_of(library, config), random_ids(700), torch.get_num_threads()
    forward.cache.reserve(720)
    last, taps = forward.prefill(ids)
    cached = [forward.cache.keys[3].clone(), forward.cache.values[3].clone()]
    expected = forward.target.model(torch.tensor([ids]), output_hidden_states=True)
    torch.testing.assert_close(forward.logits(last)[0], expected.logits[0, -1], atol=1e-4, rtol=1e-4)
    own = torch.cat([expected.hidden_states[boundary] for boundary in BOUNDARIES[:2]], dim=-1)
    torch.testing.assert_close(taps[..., : own.shape[-1]], own, atol=1e-4, rtol=1e-4)
    ends = (33, 34, 530, 700)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            forward.cache.keys[3].fill_(7.0)
            parts = [forward.prefill(ids[:end], start) for start, end in zip((0, *ends), ends, strict=False)]
            assert torch.equal(parts[-1][0], last)
            assert torch.equal(torch.cat([part for _, part in parts], dim=1), taps)
            assert torch.equal(forward.cache.keys[3][:, :, :700], cached[0][:, :, :700])
            assert torch.equal(forward.cache.values[3][:, :, :700], cached[1][:, :, :700])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_lower_precisions_are_the_float32_forward_of_their_weights(library: ctypes.CDLL, precision: str) -> None:
    """Up to the cache, which is kept in bfloat16."""
    ids, config = random_ids(30), CONFIGS["qwen2, windows"]
    forward, oracle = forward_of(library, config, precision), target_of(config)
    for name, parameter in oracle.model.named_parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
        if precision == "int8" and parameter.dim() == 2 and "embed" not in name:
            parameter.data = dequantise(*quantise(parameter.data))
    expected = oracle.model(torch.tensor([ids])).logits[0]
    forward.cache.reserve(64)
    forward.prefill(ids[:26])
    got = forward.logits(forward.verify(ids[26:], 26))
    assert float((got - expected[26:]).abs().max()) < 0.01 * float(expected.abs().max())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_has_the_same_bits_alone_in_chains_in_trees_and_by_any_number_of_threads(
    library: ctypes.CDLL, precision: str
) -> None:
    forward, ids = forward_of(library, CONFIGS["mistral, window"], precision), random_ids(290)
    forward.cache.reserve(320)
    forward.prefill(ids[:250])
    threads = torch.get_num_threads()
    singles = []
    for at in range(250, 270):
        logits = forward.logits(forward.verify(ids[at : at + 1], at))
        singles.append(torch.cat([logits[0], forward.taps()[0, 0]]))
    try:
        for count in (2, 3, 5, 8, 13):
            torch.set_num_threads(1 + count % 3)
            for at in range(250, 257):
                logits = forward.logits(forward.verify(ids[at : at + count], at))
                rows = torch.cat([logits, forward.taps()[0]], dim=-1)
                assert torch.equal(rows, torch.stack(singles[at - 250 : at - 250 + count])), (count, at)
    finally:
        torch.set_num_threads(threads)
    for parents in ([-1, 0, 0], [-1, 0, 0, 1, 2, 2, 5, 3], [-1, 0, 0, 0, 2, 2, 4, 6, 6, 7]):
        tree_ids = random_ids(len(parents), seed=9)
        logits = forward.logits(forward.verify(tree_ids, 254, parents))
        rows = torch.cat([logits, forward.taps()[0]], dim=-1)
        for path in leaf_paths(parents):
            logits = forward.logits(forward.verify([tree_ids[row] for row in path], 254))
            chain = torch.cat([logits, forward.taps()[0]], dim=-1)
            assert torch.equal(chain, rows[path]), path


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_kept_path_leaves_the_cache_that_a_chain_leaves(library: ctypes.CDLL, precision: str) -> None:
    forward, ids = forward_of(library, CONFIGS["llama"], precision), random_ids(20)
    forward.cache.reserve(64)
    forward.prefill(ids)
    parents, tree_ids, start = [-1, 0, 0, 1, 2, 2, 4], [9, 8, 7, 6, 5, 4, 3], len(ids)
    path = path_to(6, parents)
    forward.verify([tree_ids[row] for row in path], start)
    expected = [buffer[:, :, : start + 4].clone() for buffer in forward.cache.keys.values()]
    forward.verify(tree_ids, start, parents)
    assert forward.taps(path).shape == (1, 4, 126)
    forward.keep(path)
    for buffer, kept in zip(forward.cache.keys.values(), expected, strict=True):
        assert torch.equal(buffer[:, :, : start + 4], kept)


def test_what_the_compiled_forward_cannot_run_takes_the_plain_path_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def why(config: PreTrainedConfig) -> str:
        engine = Engine(target_of(config), num_steps=2, announce=False)
        assert engine.facts.path == "plain"
        engine.close()
        return engine.facts.describe()

    assert "granite is none of llama" in why(GraniteConfig(**SHAPE))
    assert "its activation is gelu" in why(LlamaConfig(**SHAPE, hidden_act="gelu"))
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "its rope is dynamic" in why(LlamaConfig(**SHAPE, rope_parameters=dynamic))
    monkeypatch.setattr(start_module, "load_native", lambda: "no C++ compiler (c++)")
    assert "plain path (no C++ compiler (c++)), bucket of" in why(CONFIGS["llama"])


def test_kernels_that_fail_their_self_test_are_left_aside_aloud(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(start_module, "check_rows", lambda forward, most, borders: False)
    monkeypatch.setattr(start_module, "say", said.append)
    engine = Engine(target_of(CONFIGS["llama"]), num_steps=2, announce=False)
    assert engine.facts.path == "plain"
    assert "fail the self-test" in said[0]
    engine.close()


def test_kernels_that_compute_something_else_are_left_aside_aloud(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(NativeForward, "verify", lambda self, ids, start, parents=None: torch.zeros(1, len(ids), 42))
    monkeypatch.setattr(start_module, "say", said.append)
    engine = Engine(target_of(CONFIGS["llama"]), num_steps=2, announce=False)
    assert engine.facts.path == "plain"
    assert "compute something else" in said[0]
    engine.close()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_either_path_writes_the_same_text_plain_and_drafted_by_lookup(precision: str, compiled: bool) -> None:
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    engine = Engine(
        target_of(CONFIGS["llama"], dtype),
        drafting=DraftingSettings(num_steps=4, ngram=2),
        kernels="auto" if compiled else "torch",
        int8=precision == "int8",
        announce=False,
    )
    assert engine.facts.lossless
    assert engine.facts.precision == precision
    for seed in range(4):
        prompt = random_ids(30, seed) * 2
        plain = engine.generate(prompt, 40, 0, ignore_eos=True)
        assert engine.generate(prompt, 40, 4, ignore_eos=True).ids == plain.ids
    engine.close()


def test_weights_are_moved_and_not_changed(library: ctypes.CDLL) -> None:
    target = target_of(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    forward = NativeForward(target, library)
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert target.embedding.data_ptr() == target.head.weight.data_ptr()
    assert forward.weight_bytes == sum(
        tensor.nbytes for name, tensor in before.items() if tensor.dim() == 2 and "embed" not in name
    )


def test_a_targets_weights_can_be_trained_with_after_an_engine() -> None:
    with torch.inference_mode(False), torch.no_grad():
        target = target_of(CONFIGS["llama"])
    Engine(target, announce=False).close()
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.randn(1, 2, 42, requires_grad=True)
        target.head(x).sum().backward()
        assert x.grad is not None


# The draft


@pytest.mark.parametrize(
    "options",
    [{}, {"fc_norm": True, "norm_output": True}, {"num_hidden_layers": 2, "block": "qwen3"}, {"fc_bias": True}],
)
def test_the_compiled_draft_is_the_draft(library: ctypes.CDLL, options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    config = DraftConfig(
        boundaries=(1, 2, 3),
        target_num_hidden_layers=4,
        target_hidden_size=42,
        target_model_type="llama",
        hidden_size=42,
        intermediate_size=100,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=20,
        vocab_size=259,
        draft_vocab_size=200,
        max_position_embeddings=512,
        initializer_range=0.2,
        **options,
    )
    draft = Draft(config)
    draft.share_embedding(torch.randn(259, 42))
    draft.eval().requires_grad_(False)
    plain, compiled = PlainDraft(draft), NativeDraft(draft, library)
    taps, ids = torch.randn(1, 30, 126), random_ids(30)
    for forward in (plain, compiled):
        forward.cache.reserve(64)
    torch.testing.assert_close(compiled.fuse(taps), plain.fuse(taps), atol=1e-4, rtol=1e-4)
    hidden = [forward.chain(forward.fuse(taps), ids, 0) for forward in (plain, compiled)]
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-3, rtol=1e-3)
    for size, parents in ((2, [-1, -1]), (3, [-1, -1, 0, 0, 1]), (2, [-1, -1, 0, 0, 1, 4, 2])):
        state = torch.randn(1, size, 42)
        hidden = [
            forward.tree(forward.feedback(state), random_ids(size, 7), 30, parents) for forward in (plain, compiled)
        ]
        assert plain.positions == compiled.positions
        torch.testing.assert_close(hidden[1], hidden[0], atol=1e-3, rtol=1e-3)
    logits = [forward.logits(h) for forward, h in zip((plain, compiled), hidden, strict=True)]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-2, rtol=1e-2)


# int8


@given(st.integers(1, 6), st.integers(1, 40), st.floats(1e-3, 1e3))
def test_a_weight_is_off_by_half_a_scale_at_most(outputs: int, inputs: int, size: float) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) * size
    weight[0] = 0.0
    rounded, scale = quantise(weight)
    assert rounded.dtype == torch.int8 and int(rounded.abs().max()) <= 127
    assert bool(((dequantise(rounded, scale) - weight).abs() <= scale[:, None] * 0.5001).all())
    assert dequantise(rounded, scale)[0].abs().max() == 0


def test_int8_of_known_weights() -> None:
    rounded, scale = quantise(torch.tensor([[127.0, -63.5, 1.0], [0.0, 0.0, 0.0]]))
    assert rounded.tolist() == [[127, -64, 1], [0, 0, 0]]
    assert scale.tolist() == [1.0, 1.0]


def test_the_int8_product_is_the_cpus_alone() -> None:
    kernel = int8_kernel(torch.empty(96, 64, dtype=torch.bfloat16, device="meta"), None)
    assert isinstance(kernel, partial) and kernel.func is torch.nn.functional.linear


def test_the_plain_paths_int8_product_is_that_of_the_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(48, 32), torch.randn(48), torch.randn(1, 3, 32).to(torch.bfloat16).float()
    expected = torch.nn.functional.linear(x, dequantise(*quantise(weight)), bias)
    assert int8_product_works()
    torch.testing.assert_close(int8_kernel(weight, bias)(x), expected, rtol=3e-2, atol=1e-1)
    monkeypatch.setattr("eyas.engine.linear.int8_product_works", lambda: False)
    torch.testing.assert_close(int8_kernel(weight, bias)(x), expected)
