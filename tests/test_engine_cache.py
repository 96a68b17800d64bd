"""The cache against an oracle: full attention over the whole sequence at once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.engine.cache import KVCache

HEADS, GROUPS, WIDTH = 4, 2, 4


def oracle(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention of [1, N, T, E] over [1, K, T, E], a row at a time, softmax written out."""
    out = torch.zeros_like(query)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        for row in range(query.shape[2]):
            first = 0 if window is None else max(0, row - window + 1)
            keys, values = key[0, group, first : row + 1], value[0, group, first : row + 1]
            weights = (keys @ query[0, head, row] / WIDTH**0.5).softmax(dim=0)
            out[0, head, row] = weights @ values
    return out


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=8),
    rejected=st.lists(st.integers(0, 4), min_size=8, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 20)),
    by_position=st.booleans(),
)
def test_rows_split_and_rolled_back_in_any_way_attend_as_in_one_piece(
    counts: list[int], rejected: list[int], window: int | None, by_position: bool
) -> None:
    total = sum(counts)
    generator = torch.Generator().manual_seed(total)
    query = torch.randn(1, HEADS, total, WIDTH, generator=generator)
    key, value = (torch.randn(1, GROUPS, total, WIDTH, generator=generator) for _ in range(2))
    cache = KVCache(torch.float32, block=8)
    cache.reserve(total + 8)
    rows, start = [], 0
    for count, wrong in zip(counts, rejected, strict=False):
        if wrong:  # rows that a verify forward rejects: written, then overwritten
            cache.begin(start, wrong, by_position=by_position)
            noise = torch.full((1, HEADS, wrong, WIDTH), 7.0)
            cache.attend(0, noise, noise[:, :GROUPS], noise[:, :GROUPS], window=window)
        part = slice(start, start + count)
        cache.begin(start, count, by_position=by_position)
        rows.append(cache.attend(0, query[:, :, part], key[:, :, part], value[:, :, part], window=window))
        start += count
    torch.testing.assert_close(torch.cat(rows, dim=2), oracle(query, key, value, window), atol=1e-5, rtol=1e-5)


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
