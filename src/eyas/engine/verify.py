"""What a verify forward decides: how many drafted tokens stand, what is emitted, and whether the text ends here."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Verdict:
    """One round. `accepted` counts drafted tokens before any cut; `tokens` are what is emitted after it."""

    accepted: int
    tokens: tuple[int, ...]
    finish: Finish | None


def judge(drafted: Sequence[int], chosen: Sequence[int], stop_ids: Collection[int], room: int) -> Verdict:
    """Greedy verification.

    `chosen[i]` is the target's token after the last token and drafted[:i], so it has one more than `drafted`; `room`
    (at least 1) is how many tokens may still be emitted. The stop token itself is emitted.
    """
    assert len(chosen) == len(drafted) + 1 and room >= 1
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
        accepted += 1
    tokens = list(chosen[: accepted + 1])
    finish: Finish | None = None
    stop = next((index for index, token in enumerate(tokens) if token in stop_ids), None)
    if stop is not None and stop < room:
        tokens, finish = tokens[: stop + 1], "stop"
    elif len(tokens) >= room:
        tokens, finish = tokens[:room], "length"
    return Verdict(accepted, tuple(tokens), finish)
