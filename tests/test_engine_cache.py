"""The cache against an oracle: full attention over the whole sequence at once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.engine.cache import KVCache, depths, leaf_paths, path_to

HEADS, GROUPS, WIDTH = 4, 2, 4


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of [1, N, T, E] over [1, K, T, E], a row at a time, softmax written out."""
    out = torch.zeros_like(query)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        for row in range(query.shape[2]):
            first = 0 if window is None else max(0, row - window + 1)
            keys, values = key[0, group, first : row + 1], value[0, group, first : row + 1]
            scores = keys @ query[0, head, row] / WIDTH**0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            sunk = 0.0 if sinks is None else sinks[head].exp()
            weights = scores.exp() / (scores.exp().sum() + sunk)
            out[0, head, row] = weights @ values
    return out


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=8),
    rejected=st.lists(st.integers(0, 4), min_size=8, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 20)),
    by_position=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    sunk=st.booleans(),
)
def test_rows_split_and_rolled_back_in_any_way_attend_as_in_one_piece(
    counts: list[int], rejected: list[int], window: int | None, by_position: bool, softcap: float | None, sunk: bool
) -> None:
    total = sum(counts)
    generator = torch.Generator().manual_seed(total)
    query = torch.randn(1, HEADS, total, WIDTH, generator=generator)
    key, value = (torch.randn(1, GROUPS, total, WIDTH, generator=generator) for _ in range(2))
    asked = {"window": window, "softcap": softcap, "sinks_N": torch.arange(HEADS) - 1.0 if sunk else None}
    cache = KVCache(torch.float32, block=8)
    cache.reserve(total + 8)
    rows, start = [], 0
    for count, wrong in zip(counts, rejected, strict=False):
        if wrong:  # rows that a verify forward rejects: written, then overwritten
            cache.begin(start, wrong, by_position=by_position)
            noise = torch.full((1, HEADS, wrong, WIDTH), 7.0)
            cache.attend(0, noise, noise[:, :GROUPS], noise[:, :GROUPS], **asked)
        part = slice(start, start + count)
        cache.begin(start, count, by_position=by_position)
        rows.append(cache.attend(0, query[:, :, part], key[:, :, part], value[:, :, part], **asked))
        start += count
    torch.testing.assert_close(torch.cat(rows, dim=2), oracle(query, key, value, *asked.values()), atol=1e-5, rtol=1e-5)


trees = st.integers(1, 9).flatmap(
    lambda count: st.tuples(*[st.integers(0, i - 1) for i in range(1, count)]).map(lambda rest: [-1, *rest])
)


def test_paths_and_depths_of_a_tree() -> None:
    parents = [-1, 0, 0, 1, 1, 3]
    assert depths(parents) == [0, 1, 1, 2, 2, 3]
    assert path_to(5, parents) == [0, 1, 3, 5]
    assert leaf_paths(parents) == [[0, 2], [0, 1, 4], [0, 1, 3, 5]]


@settings(max_examples=40, deadline=None)
@given(parents=trees, prompt=st.integers(1, 20), window=st.one_of(st.none(), st.integers(1, 12)), data=st.data())
def test_a_row_of_a_tree_attends_to_what_it_follows_and_nothing_beside(
    parents: list[int], prompt: int, window: int | None, data: st.DataObject
) -> None:
    rows = len(parents)
    generator = torch.Generator().manual_seed(prompt)
    query = torch.randn(1, HEADS, prompt + rows, WIDTH, generator=generator)
    key, value = (torch.randn(1, GROUPS, prompt + rows, WIDTH, generator=generator) for _ in range(2))
    cache = KVCache(torch.float32, block=8)
    cache.reserve(prompt + rows + 8)
    cache.begin(0, prompt, by_position=False)
    cache.attend(0, *(states[:, :, :prompt] for states in (query, key, value)), window=window)

    cache.begin_paths(prompt, parents, rows)
    context = cache.attend(0, *(states[:, :, prompt:] for states in (query, key, value)), window=window)
    for path in leaf_paths(parents):
        chain = [*range(prompt), *[prompt + row for row in path]]
        expected = oracle(query[:, :, chain], key[:, :, chain], value[:, :, chain], window)[:, :, prompt:]
        torch.testing.assert_close(context[:, :, path], expected, atol=1e-5, rtol=1e-5)

    kept = path_to(data.draw(st.integers(0, rows - 1)), parents)
    cache.keep(kept)
    end = prompt + len(kept)
    chain = [*range(prompt), *[prompt + row for row in kept]]
    assert torch.equal(cache.keys[0][:, :, :end], key[:, :, chain])
    assert torch.equal(cache.values[0][:, :, :end], value[:, :, chain])


@settings(max_examples=40, deadline=None)
@given(parents=trees, prompt=st.integers(1, 20), data=st.data())
def test_a_tree_grown_piece_by_piece_attends_as_its_paths(parents: list[int], prompt: int, data: st.DataObject) -> None:
    rows = len(parents)
    query = torch.randn(1, HEADS, prompt + rows, WIDTH)
    key, value = (torch.randn(1, GROUPS, prompt + rows, WIDTH) for _ in range(2))
    cache = KVCache(torch.float32, block=8)
    cache.reserve(prompt + rows)
    cache.begin(0, prompt, by_position=False)
    cache.attend(0, *(states[:, :, :prompt] for states in (query, key, value)))
    parts, done = [], 0
    while done < rows:
        end = data.draw(st.integers(done + 1, rows))
        cache.begin_tree(prompt, parents[:end], end - done)
        part = slice(prompt + done, prompt + end)
        parts.append(cache.attend(0, query[:, :, part], key[:, :, part], value[:, :, part]))
        done = end
    context = torch.cat(parts, dim=2)
    for path in leaf_paths(parents):
        chain = [*range(prompt), *[prompt + row for row in path]]
        expected = oracle(query[:, :, chain], key[:, :, chain], value[:, :, chain], None)[:, :, prompt:]
        torch.testing.assert_close(context[:, :, path], expected, atol=1e-5, rtol=1e-5)


def test_growing_room_starts_afresh_and_keeps_what_is_large_enough() -> None:
    cache = KVCache(torch.float32)
    cache.reserve(10)
    assert cache.capacity == 256
    cache.begin(0, 2)
    states = torch.ones(1, 1, 2, 4)
    cache.attend(3, states, states, states)
    kept = cache.keys[3]
    cache.reserve(256)
    assert cache.keys[3] is kept
    cache.reserve(257)
    assert (cache.capacity, cache.keys) == (512, {})
