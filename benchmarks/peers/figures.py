"""Figures of the answers: tokens/s with their intervals, accept length in one way for all, and which rows are void."""

import random
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

from eyas.errors import InputError
from eyas.measure import stats
from eyas.measure.stats import RESAMPLES, Timing

JSON = dict[str, Any]
MOST_APART = 0.05
"""How far a peer's float32 accept length may be from ours before it serves another draft than we do."""


def timing(answer: JSON) -> Timing:
    return Timing(len(answer["ids"]) - 1, answer["seconds_decode"], answer["seconds_prefill"])


def accept_length(answers: Sequence[JSON]) -> float | None:
    """Tokens emitted over forwards of the target, the prefill's own token and forward left out."""
    forwards = sum(answer["forwards"] for answer in answers)
    return sum(len(answer["ids"]) - 1 for answer in answers) / forwards if forwards else None


def interval(timings: Sequence[Timing], seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval of the tokens/s of all prompts together, prompts resampled."""
    usable = [one for one in timings if one.tokens]
    if not usable:
        return None
    rng = random.Random(seed)
    rates = [stats.rates(rng.choices(usable, k=len(usable)))["output_tok_s"] for _ in range(RESAMPLES)]
    cuts = quantiles(rates, n=40, method="inclusive")
    return [round(cuts[0], 2), round(cuts[-1], 2)]


def row(answers: Mapping[str, JSON], void: str | None = None) -> JSON:
    """One engine's row. `answers` by prompt id; empty for an engine that did not run."""
    found = list(answers.values())
    timings = [timing(answer) for answer in found]
    length = accept_length(found)
    wall = sum(answer["seconds_wall"] for answer in found)
    known = sum(one.seconds + one.seconds_prefill for one in timings)
    return {
        "tok_s": stats.rates(timings)["output_tok_s"] if any(one.tokens for one in timings) else None,
        "accept_length": round(length, 4) if length else None,
        "void": void or (None if found else "it answered nothing"),
        "tok_s_interval": interval(timings),
        "prompts": len(found),
        "tokens": sum(one.tokens for one in timings),
        "unaccounted": round(1 - known / wall, 4) if wall else None,
    }


def table(answers: Mapping[str, Mapping[str, JSON]], voids: Mapping[str, str]) -> dict[str, JSON]:
    """Engine to row, with `eyas_over`: how many times as fast as each peer Eyas is, paired by prompt."""
    rows = {engine: row(found, voids.get(engine)) for engine, found in answers.items()}
    ours = answers.get("eyas", {})
    for engine, found in answers.items():
        if engine != "eyas":
            rows[engine]["eyas_over"] = over(found, ours)
    return rows


def over(peer: Mapping[str, JSON], ours: Mapping[str, JSON]) -> dict[str, float] | None:
    """The peer's seconds a token over ours, on the prompts that both answered."""
    pairs = [(timing(peer[prompt]), timing(ours[prompt])) for prompt in peer if prompt in ours]
    try:
        return stats.speedup(pairs).as_dict()
    except InputError:
        return None  # no prompt has a token to be timed on both sides


def same_texts(answers: Mapping[str, JSON], reference: Mapping[str, JSON]) -> float | None:
    """Share of prompts whose ids are the reference's."""
    both = [prompt for prompt in answers if prompt in reference]
    if not both:
        return None
    return round(sum(answers[prompt]["ids"] == reference[prompt]["ids"] for prompt in both) / len(both), 4)


def miswired(rows: Mapping[str, JSON]) -> dict[str, str]:
    """Peers whose float32 accept length at one chain length is not ours, with the reason that voids their rows."""
    ours = rows.get("eyas", {}).get("accept_length")
    found = {}
    for engine, one in rows.items():
        theirs = one["accept_length"]
        if ours and theirs and engine != "eyas" and not one["void"] and abs(theirs / ours - 1) > MOST_APART:
            found[engine] = (
                f"mis-wired draft: float32 accept length {theirs:.3f} against {ours:.3f} with the same draft and chain"
            )
    return found
