"""Figures of a paired comparison: survival, rates, and the speed-up with its bootstrap interval. No torch."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from eyas.errors import InputError

RESAMPLES = 2000


@dataclass(frozen=True)
class Timing:
    """One prompt decoded one way: tokens after the prefill's own, and the seconds they took."""

    tokens: int
    seconds: float
    seconds_prefill: float = 0.0


@dataclass(frozen=True)
class Interval:
    """A bootstrap median and the 95 % interval around it."""

    median: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return {"median": round(self.median, 4), "low": round(self.low, 4), "high": round(self.high, 4)}


def speedup(pairs: Sequence[tuple[Timing, Timing]], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """(plain, speculative) of each prompt to the ratio of decode seconds per output token, prompts resampled.

    Both timings of a prompt are drawn together, so what makes a prompt slow both ways cancels. Above 1 speculation
    is faster. Raises InputError where no pair has tokens on both sides.
    """
    usable = [(plain, fast) for plain, fast in pairs if plain.tokens and fast.tokens]
    if not usable:
        raise InputError(
            wanted="a prompt whose answer has a token after its first, which the prefill gives",
            got=f"none among {len(pairs)}",
            where="bench",
            next="a larger --max-new-tokens, or prompts with longer answers",
        )
    rng = random.Random(seed)
    ratios = [_ratio(rng.choices(usable, k=len(usable))) for _ in range(resamples)]
    cuts = quantiles(ratios, n=40, method="inclusive")
    return Interval(cuts[19], cuts[0], cuts[-1])


def _ratio(pairs: Sequence[tuple[Timing, Timing]]) -> float:
    plain = sum(p.seconds for p, _ in pairs) / sum(p.tokens for p, _ in pairs)
    fast = sum(f.seconds for _, f in pairs) / sum(f.tokens for _, f in pairs)
    return plain / fast


def rates(timings: Sequence[Timing]) -> dict[str, float | int]:
    """`output_tok_s`, `tpot_ms` (decode only), `ttft_ms` (the target's prefill) and `n` prompts."""
    tokens, seconds = sum(t.tokens for t in timings), sum(t.seconds for t in timings)
    prefill = sum(t.seconds_prefill for t in timings) / max(1, len(timings))
    per_token = seconds / tokens if tokens else 0.0
    return {
        "output_tok_s": round(1 / per_token, 3) if per_token else 0.0,
        "ttft_ms": round(prefill * 1e3, 3),
        "tpot_ms": round(per_token * 1e3, 4),
        "output_tokens": tokens,
        "n": len(timings),
    }


def survival(rounds: Sequence[int], num_steps: int) -> list[float]:
    """Share of all rounds whose first 1, 2, ... num_steps drafted tokens were accepted."""
    return [round(sum(accepted >= i for accepted in rounds) / max(1, len(rounds)), 6) for i in range(1, num_steps + 1)]


def accept_length(rounds: Sequence[int]) -> float:
    """Tokens gained a round, bonus included, counted before any cut; 1.0 where there was no round."""
    return 1 + sum(rounds) / max(1, len(rounds))


@dataclass(frozen=True)
class Depth:
    """A chain depth and what it is predicted to gain over plain decoding."""

    num_steps: int
    accept_length: float
    seconds_per_token: float
    speedup: float


def predict(survival: Sequence[float], plain: float, round_seconds: Mapping[int, float]) -> list[Depth]:
    """One prediction a depth that has both a survival and a cost. `plain` is a plain step, all in seconds."""
    depths = []
    for num_steps, seconds in sorted(round_seconds.items()):
        if num_steps <= len(survival):
            gained = 1 + sum(survival[:num_steps])
            depths.append(Depth(num_steps, gained, seconds / gained, plain * gained / seconds))
    return depths


def choose_num_steps(survival: Sequence[float], plain: float, round_seconds: Mapping[int, float]) -> Depth:
    """The depth with the most predicted tokens a second; the shallower of equals."""
    depths = predict(survival, plain, round_seconds)
    assert depths, "no depth has both a survival and a cost"
    return min(depths, key=lambda depth: (depth.seconds_per_token, depth.num_steps))
