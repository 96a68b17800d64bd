"""Vocabulary maps: one strictly increasing map into the target's vocabulary, whatever was counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import InputError
from eyas.models.vocab import build_vocab, check_vocab, coverage, draft_ids, target_ids


def test_the_most_counted_tokens_are_kept_in_ascending_order() -> None:
    d2t, t2d = build_vocab(torch.tensor([0, 5, 1, 9, 5, 0]), 3)
    assert target_ids(d2t).tolist() == [1, 3, 4]
    assert d2t.tolist() == [1, 2, 2]
    assert t2d.tolist() == [False, True, False, True, True, False]
    assert draft_ids(t2d).tolist() == [-1, 0, -1, 1, 2, -1]


def test_the_stop_token_is_kept_however_rare() -> None:
    d2t, t2d = build_vocab(torch.tensor([0, 5, 1, 9, 5, 0]), 3, keep=[5])
    assert target_ids(d2t).tolist() == [1, 3, 5]
    assert bool(t2d[5])


def test_places_left_over_go_to_the_lowest_ids_once_each() -> None:
    d2t, _ = build_vocab(torch.tensor([0, 0, 0, 7, 0, 0]), 4)
    assert target_ids(d2t).tolist() == [0, 1, 2, 3]


def test_a_full_vocabulary_is_the_identity() -> None:
    d2t, t2d = build_vocab(torch.tensor([3, 0, 2]), 3)
    assert d2t.tolist() == [0, 0, 0] and t2d.all()


def test_coverage_is_the_share_of_counted_tokens() -> None:
    counts = torch.tensor([6, 1, 0, 3])
    assert coverage(counts, torch.tensor([True, False, False, True])) == 0.9


@settings(max_examples=100, deadline=None)
@given(data=st.data(), vocab_size=st.integers(1, 60))
def test_every_map_built_keeps_the_invariants(data: st.DataObject, vocab_size: int) -> None:
    size = data.draw(st.integers(1, vocab_size))
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=vocab_size, max_size=vocab_size)))
    keep = data.draw(st.sets(st.integers(0, vocab_size - 1), max_size=size))
    d2t, t2d = build_vocab(counts, size, keep)
    check_vocab(d2t, t2d)
    ids = target_ids(d2t)
    assert t2d.sum() == size and t2d[ids].all() and d2t.dtype == torch.int64
    assert (ids[1:] > ids[:-1]).all()
    assert keep <= set(ids.tolist())
    assert (draft_ids(t2d)[ids] == torch.arange(size)).all()
    left_out, taken = counts[~t2d], counts[[i for i in ids.tolist() if i not in keep]]
    assert not len(left_out) or not len(taken) or left_out.max() <= taken.min()


@pytest.mark.parametrize("size", [0, 7])
def test_a_size_that_does_not_fit_is_refused(size: int) -> None:
    with pytest.raises(InputError):
        build_vocab(torch.ones(6, dtype=torch.int64), size)


def test_stop_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError):
        build_vocab(torch.ones(6, dtype=torch.int64), 2, keep=[1, 2, 3])
    with pytest.raises(InputError):
        build_vocab(torch.ones(6, dtype=torch.int64), 2, keep=[6])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_count_that_is_no_number_is_refused_before_it_displaces_the_kept_ids(value: float) -> None:
    with pytest.raises(InputError, match="got 1 of 6 that are not"):
        build_vocab(torch.tensor([0.0, 5.0, value, 9.0, 5.0, 0.0]), 3, keep=[5])


MASK = torch.tensor([False, True, False, True, True, False])


@pytest.mark.parametrize(
    ("d2t", "t2d", "words"),
    [
        ([1, 3, 4], MASK, "subtract arange"),
        ([1, 2, 4], MASK, "strictly increasing"),
        ([1, 2, -1], MASK, "strictly increasing"),
        ([-1, 2, 2], MASK, "strictly increasing"),
        ([1, 2], MASK, "3 true for 2"),
        ([1, 2, 2], MASK.int(), "torch.int32"),
        ([1.0, 2.0, 2.0], MASK, "torch.float32"),
        ([0] * 7, MASK, "at most 6"),
    ],
)
def test_a_broken_map_is_refused_in_words(d2t: list[float], t2d: torch.Tensor, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_vocab(torch.tensor(d2t), t2d)
    assert words in str(caught.value)


def test_a_missing_mask_is_no_error_but_a_map_out_of_range_is() -> None:
    check_vocab(torch.tensor([1, 2, 2]), None, vocab_size=6)
    with pytest.raises(InputError):
        check_vocab(torch.tensor([1, 2, 2]), None, vocab_size=4)
