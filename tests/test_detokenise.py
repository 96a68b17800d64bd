"""Text as it comes: joined it is the whole decode, no character is split, no part of a stop string is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.server.detokenise import LETTERS, Detokeniser, StopWatch, bytes_of
from tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(st.text(max_size=40))
def test_pieces_of_a_text_join_to_it_and_split_no_character(text: str) -> None:
    detokeniser = Detokeniser(decode)
    pieces = [detokeniser.add(token) for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]]
    assert "".join(pieces) + detokeniser.end() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 258), max_size=60))
def test_pieces_of_any_ids_join_to_their_decode(ids: list[int]) -> None:
    detokeniser = Detokeniser(decode)
    joined = "".join(detokeniser.add(token) for token in ids) + detokeniser.end()
    assert joined.replace("\N{REPLACEMENT CHARACTER}", "") == decode(ids).replace("\N{REPLACEMENT CHARACTER}", "")


class Spaces:
    """As sentencepiece decodes: every word brings its space, which the first one loses; 0 is special."""

    WORDS = ("", " a", " b", "c")

    def __call__(self, ids: list[int]) -> str:
        return "".join(self.WORDS[token] for token in ids).removeprefix(" ")


@given(st.lists(st.integers(0, 3), max_size=20))
def test_spaces_between_words_are_kept_and_the_first_is_not(ids: list[int]) -> None:
    spaces = Spaces()
    detokeniser = Detokeniser(spaces)
    assert "".join(detokeniser.add(token) for token in ids) + detokeniser.end() == spaces(ids)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 4))
def test_what_is_shown_ends_before_the_first_stop_string_whatever_the_pieces(
    text: str, stops: list[str], size: int
) -> None:
    watch, shown = StopWatch(stops), ""
    for start in range(0, len(text), size):
        shown += watch.add(text[start : start + size])
        assert text.startswith(shown)
        if watch.found is not None:
            break
    shown += watch.end()
    complete = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if size == 1 and complete:
        # Letter by letter the stop that is complete first ends the text.
        end = min(place + len(stop) for place, stop in complete)
        assert watch.found is not None and shown + watch.found == text[: len(shown) + len(watch.found)]
        assert len(shown) + len(watch.found) == end
    if not complete:
        assert (shown, watch.found) == (text, None)
    else:
        assert watch.found in stops and not any(stop in shown for stop in stops)


@pytest.mark.parametrize(("pieces", "shown"), [(["ab", "ab", "c"], ["", "ab", ""]), (["xa", "y"], ["x", "ay"])])
def test_only_what_may_begin_a_stop_is_held_back(pieces: list[str], shown: list[str]) -> None:
    watch = StopWatch(["abc"])
    assert [watch.add(piece) for piece in pieces] == shown


def test_a_part_of_a_character_is_its_bytes() -> None:
    assert bytes_of("a b", "a\u0120b") == b"a b", "what is whole is its text"
    assert bytes_of("\N{REPLACEMENT CHARACTER}", "\u00e2\u0124") == b"\xe2\x82"
    assert bytes_of("\N{REPLACEMENT CHARACTER}", "<0xE2>") == b"\xe2"
    assert bytes_of("\N{REPLACEMENT CHARACTER}", "\u4e00") == "\N{REPLACEMENT CHARACTER}".encode(), "another alphabet"
    assert sorted(LETTERS.values()) == list(range(256)) and LETTERS["\u0120"] == ord(" ")
