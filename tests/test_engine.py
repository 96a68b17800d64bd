"""The embedded engine: what it must never change (the text) and what it must always keep (caches, counts)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.engine.cache import KVCache, attended_length, leaf_paths, path_to
from eyas.engine.costs import best_seconds
from eyas.engine.forward import TargetForward
from eyas.engine.generate import Engine
from eyas.engine.linear import KERNELS, available_kernels, fastest_kernels
from eyas.engine.propose import DraftProposer
from eyas.engine.settle import settle
from eyas.engine.spans import Spans
from eyas.engine.tree import chain
from eyas.engine.verify import Verdict, cut, walk
from eyas.errors import InputError
from eyas.formats.draft_config import DraftConfig
from eyas.models.draft import Draft, make_draft
from eyas.models.target import Target, load_target
from replay import ReplayProposer
from tiny import save_tiny_target

PRECISIONS = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(params=PRECISIONS)
def target(folder: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(str(folder), dtype=request.param)


@pytest.fixture
def target32(folder: Path) -> Target:
    return load_target(str(folder))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_draft(target: Target, **options: object) -> Draft:
    config = target.config
    torch.manual_seed(5)
    draft = make_draft(
        DraftConfig(
            boundaries=(2, 4, 5),
            target_num_hidden_layers=target.num_hidden_layers,
            target_hidden_size=target.hidden_size,
            target_model_type="llama",
            hidden_size=target.hidden_size,
            intermediate_size=96,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=200,
            max_position_embeddings=config.max_position_embeddings,
            **options,
        )
    )
    draft.d2t.copy_(torch.arange(200) % 2 * 50)
    return draft


def engine_of(target: Target, num_steps: int = 3, kernels: str = "torch") -> Engine:
    return Engine(target, random_draft(target), num_steps=num_steps, kernels=kernels, announce=False)


def prompts(count: int, vocab_size: int = 259) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


# Rows


@pytest.mark.parametrize("kernels", ["torch", "onednn"])
def test_a_row_has_the_same_bits_in_forwards_of_1_to_8_rows_across_a_length_border(
    target: Target, kernels: str
) -> None:
    engine = engine_of(target, num_steps=7, kernels=kernels)
    assert engine.facts.lossless
    forward, ids = engine.forward, (prompts(40)[-1] * 300)[:280]
    forward.cache.reserve(320)
    first = 244
    forward.prefill(ids[:first])
    rows = [forward.logits(forward.verify(ids[i : i + 1], i))[0] for i in range(first, 272)]
    for count in range(1, 9):
        for start in range(first, 264, count):
            logits = forward.logits(forward.verify(ids[start : start + count], start))[:count]
            assert torch.equal(logits, torch.stack(rows[start - first : start - first + count])), (count, start)


TREES = [
    [-1, 0, 0],
    [-1, 0, 0, 1, 1, 2],
    [-1, 0, 0, 0, 1, 2, 4, 4],
    [-1, 0, 1, 2, 3, 4, 5, 2],
]


@pytest.mark.parametrize("parents", TREES)
def test_a_trees_rows_have_the_bits_of_their_paths_as_chains_across_a_length_border(
    target: Target, parents: list[int]
) -> None:
    forward, vocab = engine_of(target, num_steps=7).forward, target.vocab_size
    ids = (prompts(40)[-1] * 300)[:280]
    forward.cache.reserve(320)
    forward.prefill(ids[:248])
    tree_ids = torch.randint(3, vocab, (len(parents),), generator=torch.Generator().manual_seed(3)).tolist()
    for start in range(248, 258):
        logits = forward.logits(forward.verify(tree_ids, start, parents))
        taps = forward.taps()[0]
        for path in leaf_paths(parents):
            chain = [tree_ids[row] for row in path]
            assert torch.equal(forward.logits(forward.verify(chain, start))[: len(path)], logits[path]), start
            assert torch.equal(forward.taps()[0, : len(path)], taps[path]), start
        forward.verify(ids[start : start + 1], start)


def test_a_kept_path_leaves_the_cache_that_a_chain_leaves(target: Target) -> None:
    forward, prompt = engine_of(target, num_steps=7).forward, prompts(40)[-1]
    forward.cache.reserve(64)
    forward.prefill(prompt)
    parents, tree_ids, start = [-1, 0, 0, 1, 2, 2, 4], [9, 8, 7, 6, 5, 4, 3], len(prompt)
    path = path_to(6, parents)
    assert path == [0, 2, 4, 6]
    end = start + len(path)
    forward.verify([tree_ids[row] for row in path], start)
    expected = {layer: keys[:, :, :end].clone() for layer, keys in forward.cache.keys.items()}
    chain_taps = forward.taps()[:, :4]
    forward.verify(tree_ids, start, parents)
    assert torch.equal(forward.taps(path), chain_taps)
    forward.keep(path)
    for layer, keys in forward.cache.keys.items():
        assert torch.equal(keys[:, :, :end], expected[layer])


def test_rows_agree_with_transformers_own_forward(target32: Target) -> None:
    ids = prompts(3)[1] * 9
    expected = target32.model(torch.tensor([ids])).logits[0]
    engine = engine_of(target32)
    engine.forward.cache.reserve(len(ids) + 8)
    half = len(ids) // 2
    engine.forward.prefill(ids[:half])
    got = [engine.forward.logits(engine.forward.verify(ids[i : i + 3], i))[:3] for i in range(half, half + 9, 3)]
    torch.testing.assert_close(torch.cat(got), expected[half : half + 9], atol=1e-4, rtol=1e-4)


def test_taps_are_the_boundaries_of_the_verified_rows(target32: Target) -> None:
    ids = prompts(2)[1][:6]
    hidden = target32.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    forward = TargetForward(target32, (0, 3, 8))
    forward.cache.reserve(16)
    forward.verify(ids, 0)
    expected = torch.cat([hidden[0], hidden[3]], dim=-1)
    torch.testing.assert_close(forward.taps()[..., :128], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target32.final_norm(forward.taps()[..., 128:]), hidden[8], atol=1e-4, rtol=1e-4)


def test_the_attended_length_depends_on_the_position_alone() -> None:
    assert [attended_length(p) for p in (0, 255, 256, 511, 512)] == [256, 256, 512, 512, 768]


def test_a_sliding_window_hides_rows_that_left_it() -> None:
    cache = KVCache(torch.float32)
    cache.reserve(8)
    keys = torch.zeros(1, 1, 6, 4)
    values = torch.arange(6.0).view(1, 1, 6, 1).expand(1, 1, 6, 4)
    cache.begin(0, 6)
    context = cache.attend(0, keys, keys, values, window=2)
    assert context[0, 0, :, 0].tolist() == [0.0, 0.5, 1.5, 2.5, 3.5, 4.5]


def test_a_kernel_is_used_only_where_it_computes_what_f_linear_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(available_kernels(torch.float32, torch.device("cpu"))) <= set(KERNELS)
    linears = [torch.nn.Linear(32, 48), torch.nn.Linear(48, 32)]
    assert set(fastest_kernels(linears, (1, 3))) == {1, 3}
    said: list[str] = []
    monkeypatch.setattr("eyas.engine.linear.say", said.append)
    monkeypatch.setitem(KERNELS, "onednn", lambda weight, bias: lambda x: x[..., :1].expand(1, x.shape[1], 96))
    assert available_kernels(torch.float32, torch.device("cpu")) == ["torch"]
    assert "onednn linears are not used" in said[0]


def test_costs_are_the_threads_own_seconds_where_it_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts what other processes take, which a choice of depth is then made by."""
    ticks = iter(range(100))
    monkeypatch.setattr("time.thread_time", lambda: float(next(ticks)))
    monkeypatch.setattr("time.perf_counter", lambda: 10.0 * next(ticks))
    for threads, seconds in ((1, 1.0), (2, 10.0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert best_seconds(lambda size: None, [1, 2], tries=2) == {1: seconds, 2: seconds}


def test_a_machine_without_row_invariance_is_told_aloud(
    target32: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eyas.engine.settle.check_rows", lambda forward, count: False)
    said: list[str] = []
    monkeypatch.setattr("eyas.engine.settle.say", said.append)
    facts = settle(TargetForward(target32), 3, "torch")
    assert not facts.lossless
    assert "near ties" in said[0]
    assert "not lossless" in facts.describe()


# Texts


def test_a_random_draft_changes_no_token(target: Target) -> None:
    engine = engine_of(target)
    for prompt in prompts(6):
        plain = engine.generate(prompt, 40, 0, ignore_eos=True)
        fast = engine.generate(prompt, 40, 3, ignore_eos=True)
        assert fast.ids == plain.ids
        assert plain.rounds == (0,) * 39
        assert sum(1 + kept for kept in fast.rounds_kept) >= 39


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_draft_right_by_turns_changes_no_token_at_any_accept_count(target: Target, num_steps: int) -> None:
    engine = engine_of(target, num_steps=num_steps)
    seen = set()
    for period, prompt in enumerate(prompts(6), start=2):
        plain = engine.generate(prompt, 40, 0, ignore_eos=True)
        engine.proposer = ReplayProposer(plain.ids, len(prompt), 259, lambda i, period=period: i % period == 0)
        fast = engine.generate(prompt, 40, num_steps, ignore_eos=True)
        assert fast.ids == plain.ids
        seen |= set(fast.rounds)
    assert seen == set(range(num_steps + 1))


def test_texts_agree_across_a_length_border(target: Target) -> None:
    engine = engine_of(target)
    prompt = (prompts(5)[2] * 300)[:238]
    plain = engine.generate(prompt, 40, 0, ignore_eos=True)
    engine.proposer = ReplayProposer(plain.ids, len(prompt), 259, lambda i: i % 7 == 0)
    assert engine.generate(prompt, 40, 3, ignore_eos=True).ids == plain.ids


def test_plain_text_is_hugging_face_generates_text(target32: Target) -> None:
    for prompt in prompts(6):
        expected = target32.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=30,
            do_sample=False,
        )[0, len(prompt) :]
        engine = engine_of(target32)
        assert list(engine.generate(prompt, 30).ids) == expected.tolist()
        engine.close()


def test_an_engine_closed_leaves_the_target_as_it_was(target32: Target) -> None:
    ids = torch.tensor([prompts(1)[0]])
    before = target32.model(ids).logits
    engine_of(target32, kernels="onednn").close()
    assert torch.equal(target32.model(ids).logits, before)
    assert "forward" not in target32.head.__dict__


def test_a_rounds_laps_cover_it(target32: Target) -> None:
    engine, prompt = engine_of(target32), prompts(6)[4]
    plain = engine.generate(prompt, 12, 3, ignore_eos=True)
    engine.spans = spans = Spans()
    timed = engine.generate(prompt, 12, 3, ignore_eos=True)
    assert timed.ids == plain.ids
    assert list(spans.shares()) == ["draft", "verify", "sampling", "cache", "host"]
    assert 0 < sum(spans.seconds.values()) <= timed.seconds_decode
    assert abs(sum(spans.shares().values()) - 1) < 0.01


# Ends


def test_acceptance_is_counted_before_the_cut() -> None:
    drafted, chosen = [5, 6, 7], [5, 6, 7, 8]
    assert judge(drafted, chosen, (), 9) == Verdict(3, (5, 6, 7, 8), None)
    assert judge(drafted, chosen, (6,), 9) == Verdict(3, (5, 6), "stop")
    assert judge(drafted, chosen, (), 2) == Verdict(3, (5, 6), "length")
    assert judge(drafted, chosen, (), 4) == Verdict(3, (5, 6, 7, 8), "length")
    assert judge(drafted, chosen, (6,), 2) == Verdict(3, (5, 6), "stop")
    assert judge(drafted, chosen, (7,), 2) == Verdict(3, (5, 6), "length")
    assert judge(drafted, [5, 9, 7, 8], (8,), 9) == Verdict(1, (5, 9), None)
    assert judge([], [4], (4,), 1) == Verdict(0, (4,), "stop")


def judge(drafted: list[int], chosen: list[int], stop_ids: tuple[int, ...], room: int) -> Verdict:
    return cut(walk(chain(drafted), lambda row, path: chosen[row]), stop_ids, room)


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_token_ends_the_text_wherever_in_a_round_it_falls(folder: Path, place: int) -> None:
    prompt = prompts(3)[2]
    engine = engine_of(load_target(str(folder)))
    text = engine.generate(prompt, 30, 0, ignore_eos=True).ids
    stop = text[place]
    end = text.index(stop) + 1
    target = load_target(str(folder))
    target.model.generation_config.eos_token_id = [258, stop]
    engine = engine_of(target)
    engine.proposer = ReplayProposer(text, len(prompt), 259, lambda i: False)
    for num_steps in (0, 3):
        got = engine.generate(prompt, 30, num_steps)
        assert (got.ids, got.finish) == (text[:end], "stop")
        assert set(got.rounds) <= {num_steps}


@pytest.mark.parametrize("limit", range(1, 10))
def test_the_length_limit_cuts_a_round_and_not_its_count(target32: Target, limit: int) -> None:
    prompt = prompts(4)[3]
    engine = engine_of(target32)
    text = engine.generate(prompt, 30, 0, ignore_eos=True).ids
    engine.proposer = ReplayProposer(text, len(prompt), 259, lambda i: False)
    got = engine.generate(prompt, limit, 3, ignore_eos=True)
    assert (got.ids, got.finish) == (text[:limit], "length")
    assert got.rounds == (3,) * -(-(limit - 1) // 4)
    assert sum(got.rounds_kept) <= limit - 1
    assert got.accept_length == (4.0 if limit > 1 else None)


def test_the_context_ends_a_text(target32: Target) -> None:
    prompt = (prompts(4)[3] * 999)[:1020]
    engine = engine_of(target32)
    for num_steps in (0, 3):
        got = engine.generate(prompt, 50, num_steps, ignore_eos=True)
        assert (len(got.ids), got.finish) == (4, "context")


def test_a_prompt_without_room_or_a_chain_without_a_draft_is_refused(target32: Target) -> None:
    engine = Engine(target32, kernels="torch", announce=False)
    for prompt in ([], [5] * 1024):
        with pytest.raises(InputError, match="1 to 1023 tokens"):
            engine.generate(prompt, 5)
    for prompt in ([5, 259], [-1, 5]):
        with pytest.raises(InputError, match="token ids from 0 to 258"):
            engine.generate(prompt, 5)
    with pytest.raises(InputError, match="a draft"):
        engine.generate([5], 5, num_steps=1)
    for count in (0, -3):
        with pytest.raises(InputError, match=f"1 new token or more; got {count}; at max_new_tokens"):
            engine.generate([5], count)
    deep = engine_of(target32)
    for num_steps in (-1, deep.num_steps + 1):
        with pytest.raises(InputError, match=f"0 .plain decoding. to {deep.num_steps} levels.*; got {num_steps}"):
            deep.generate([5], 5, num_steps=num_steps)
    deep.close()


@pytest.mark.parametrize(
    ("words", "ids", "tokens", "steps"),
    [
        ("max_new_tokens", [1], 2.5, 0),
        ("num_steps", [1], 5, 1.5),
        ("float .1.5.", [1.5], 5, 0),
        ("str .'h'.", "hello", 5, 0),
        ("bool .True.", [True], 5, 0),
        ("Tensor", torch.tensor([[1, 2]]), 5, 0),
    ],
)
def test_what_is_no_token_or_no_count_is_refused_in_words(
    target32: Target, words: str, ids: Any, tokens: Any, steps: Any
) -> None:
    engine = Engine(target32, announce=False)
    with pytest.raises(InputError, match=words):
        engine.generate(ids, tokens, steps)
    engine.close()


@pytest.mark.parametrize(
    "choice",
    [{"kernels": "banana"}, {"draft_dtype": torch.float16}, {"cache_rows": -4}],
    ids=lambda choice: next(iter(choice)),
)
def test_a_choice_that_an_engine_does_not_have_is_refused_before_it_starts(
    target32: Target, choice: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=f"Engine: {next(iter(choice))}"):
        Engine(target32, announce=False, **choice)


def test_a_draft_for_another_target_is_refused(target32: Target, tmp_path: Path) -> None:
    other = load_target(str(save_tiny_target(tmp_path / "other", hidden=32)))
    with pytest.raises(InputError, match=r"\(8, 64, 259\)"):
        Engine(target32, random_draft(other), kernels="torch", announce=False)


# Caches


def test_after_rejections_the_target_cache_is_that_of_plain_decoding(target: Target) -> None:
    engine, prompt = engine_of(target), prompts(8)[5]
    plain = engine.generate(prompt, 40, 0, ignore_eos=True)
    rows = len(prompt) + 39
    before = [engine.forward.cache.keys[layer][:, :, :rows].clone() for layer in range(8)]
    engine.proposer = ReplayProposer(plain.ids, len(prompt), 259, lambda i: i % 3 == 0)
    engine.generate(prompt, 40, 3, ignore_eos=True)
    for layer in range(8):
        # The last round's tail may lie beyond what plain decoding wrote; what both hold is equal.
        assert torch.equal(engine.forward.cache.keys[layer][:, :, : rows - 4], before[layer][:, :, : rows - 4])


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True}, {"num_hidden_layers": 2}])
def test_after_rejections_the_draft_cache_is_that_of_a_fresh_prefill(target32: Target, options: dict) -> None:
    draft, prompt = random_draft(target32, **options), prompts(8)[6]
    engine = Engine(target32, draft, num_steps=3, kernels="torch", announce=False)
    text = engine.generate(prompt, 24, 3, ignore_eos=True).ids
    assert isinstance(engine.proposer, DraftProposer)
    told = engine.proposer.next_row
    ids = [*prompt, *text]
    _, taps = engine.forward.prefill(ids[:told])
    fresh = DraftProposer(draft)
    fresh.cache.reserve(told)
    assert taps is not None
    fresh.observe(taps, ids[1 : told + 1], 0)
    assert told >= len(prompt) + 19
    for layer, keys in fresh.cache.keys.items():
        torch.testing.assert_close(engine.proposer.cache.keys[layer][:, :, :told], keys[:, :, :told])


def test_decoding_allocates_no_buffer_after_the_prefill(target32: Target) -> None:
    engine, prompt = engine_of(target32), prompts(8)[7]
    engine.generate(prompt, 30, 3, ignore_eos=True)
    places = [keys.data_ptr() for keys in engine.forward.cache.keys.values()]
    engine.generate(prompt, 30, 3, ignore_eos=True)
    assert [keys.data_ptr() for keys in engine.forward.cache.keys.values()] == places
