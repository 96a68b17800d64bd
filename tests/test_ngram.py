"""n-gram drafting: literal texts, and a search by hand beside the index."""

from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.ngram import NgramProposer


def told(ids: list[int], longest: int = 3) -> NgramProposer:
    proposer = NgramProposer(longest)
    proposer.observe(None, ids, 0)
    return proposer


def test_what_followed_the_latest_longest_match_is_drafted() -> None:
    assert told([1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]).propose(2).tokens == (4, 9)
    assert told([2, 3, 4, 9, 2, 3, 5, 8, 2, 3]).propose(3).tokens == (5, 8, 2)


def test_a_loop_is_drafted_as_a_loop() -> None:
    assert told([7, 8, 7, 8]).propose(5).tokens == (7, 8, 7, 8, 7)
    assert told([4, 4, 4]).propose(4).tokens == (4, 4, 4, 4)


def test_without_a_match_nothing_is_drafted() -> None:
    for ids in ([], [1], [1, 2], [1, 2, 3, 2]):
        assert told(ids).propose(4).tokens == ()


def test_a_new_text_remembers_nothing() -> None:
    proposer = told([7, 8, 7, 8])
    proposer.begin()
    proposer.observe(None, [7, 8], 0)
    assert proposer.propose(3).tokens == ()


def by_hand(ids: list[int], longest: int, num_steps: int) -> tuple[int, ...]:
    for length in range(longest, min(2, longest) - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if length <= len(ids) and ids[end - length : end] == ids[-length:]:
                drafted = list(ids)
                for index in range(num_steps):
                    drafted.append(drafted[end + index])
                return tuple(drafted[len(ids) :])
    return ()


@given(
    parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=10),
    longest=st.integers(1, 4),
    num_steps=st.integers(0, 5),
)
def test_the_index_finds_what_a_search_finds(parts: list[list[int]], longest: int, num_steps: int) -> None:
    proposer, ids = NgramProposer(longest), []
    for part in parts:
        proposer.observe(None, part, len(ids))
        ids += part
        assert proposer.propose(num_steps).tokens == by_hand(ids, longest, num_steps)
