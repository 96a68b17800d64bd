"""Token ids to text, as they come: no character is split, no part of a stop string is shown."""

import re
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MOST_UNFINISHED = 16
"""Tokens whose bytes may be pending before what is broken is shown as such."""
WINDOW = 8
"""Tokens decoded anew with each: dropping what came before costs a decode of its own."""


class Detokeniser:
    """The text of ids given one by one: all that was given back, joined, is `decode` of all ids.

    A token is decoded beside the few before it, since what it looks like may depend on them.
    """

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._ids: list[int] = []
        self._shown = 0
        """Characters of these ids' text that were given back."""
        self._settled = 0
        """How many of these ids that text comes from."""

    def add(self, token: int) -> str:
        """The text that is certain now; empty while a character is unfinished."""
        self._ids.append(token)
        text = self.decode(self._ids)
        pending = len(self._ids) - self._settled
        if text.endswith(UNFINISHED) and pending < MOST_UNFINISHED:
            return ""
        return self._give(text)

    def end(self) -> str:
        """What is left: an unfinished character is shown as broken."""
        return self._give(self.decode(self._ids)) if self._ids else ""

    def _give(self, text: str) -> str:
        given, latest = text[self._shown :], self._settled
        if given and len(self._ids) > WINDOW:  # tokens without text (special ones) are no context for the next
            self._ids = self._ids[latest:]
            text = self.decode(self._ids)
        self._settled, self._shown = len(self._ids), len(text)
        return given


class StopWatch:
    """Text passes until a stop string is complete; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """What may be shown. Once `found` is set it is what stood before the stop string, and nothing more comes."""
        if self.found is not None:
            return ""
        self.held += text
        places = [(self.held.find(stop), stop) for stop in self.stops]
        first = min(((place, stop) for place, stop in places if place >= 0), default=None)
        if first is not None:
            self.found = first[1]
            return self._release(first[0])
        return self._release(len(self.held) - self._beginning())

    def end(self) -> str:
        """What was held back and is no stop string after all."""
        return "" if self.found is not None else self._release(len(self.held))

    def _release(self, count: int) -> str:
        shown, self.held = self.held[:count], self.held[count:]
        return shown

    def _beginning(self) -> int:
        """Characters at the end of what is held that a stop string begins with."""
        return max((_overlap(self.held, stop) for stop in self.stops), default=0)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def bytes_of(text: str, piece: str) -> bytes:
    """What a token stands for. `piece` is its entry in the vocabulary: byte by byte in GPT-2's letters, or `<0xE2>` as
    sentencepiece falls back; it decides where `text` has a broken character."""
    if UNFINISHED not in text:
        return text.encode()
    if fallback := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes.fromhex(fallback[1])
    known = [LETTERS.get(letter) for letter in piece]
    return bytes(byte for byte in known if byte is not None) if None not in known else text.encode()


def _letters() -> dict[str, int]:
    """GPT-2's letter of every byte (its encoder.py): printable ones are themselves, the others follow from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


LETTERS = _letters()
