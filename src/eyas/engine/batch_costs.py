"""What a round costs with several texts side by side: the depth that pays for one may not pay for eight.

A forward over few rows is bound by reading the weights, over many by multiplying: drafted rows are nearly free for one
text and cost nearly as much as the tokens they stand for where many texts fill a forward anyway.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.costs import CONTEXT, RoundCosts, best_seconds
from eyas.engine.draft_texts import propose_texts, side_by_side
from eyas.engine.forward import Forward
from eyas.engine.generate import Engine
from eyas.engine.propose import Proposer
from eyas.engine.together import measure_texts
from eyas.settings import DraftingSettings

SIZES, TRIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), 3


@dataclass(frozen=True)
class BatchCosts:
    """Seconds of verify forwards by rows, and of drafting by depth and by texts."""

    verify: dict[int, float]
    draft: dict[int, dict[int, float]]
    drafting: DraftingSettings
    bucket: int | None = None
    """Rows that a text takes however deep it drafts (the plain path); None: as many as it verifies."""
    row: float = 0.0
    """RoundCosts' of a lone text: in plain steps of one."""

    def of(self, texts: int) -> RoundCosts:
        """Of a round in which so many texts draft equally deep, a plain one being 1."""
        plain = self._rows(texts, 1)
        trees = {
            depth: self._rows(texts, self.drafting.rows(depth)) + between(by_texts, texts)
            for depth, by_texts in self.draft.items()
        }
        chains = {depth: self._rows(texts, depth + 1) for depth in self.draft}
        return RoundCosts(
            {0: 1.0} | {depth: seconds / plain for depth, seconds in trees.items()},
            {0: 1.0} | {depth: seconds / plain for depth, seconds in chains.items()},
            self.row * self._rows(1, 1) / plain,
        )

    def _rows(self, texts: int, verified: int) -> float:
        return between(self.verify, texts * (self.bucket or verified))


def between(seconds: Mapping[int, float], size: int) -> float:
    """On the line through the two sizes around it that were measured, beyond the largest in its proportion."""
    sizes = sorted(seconds)
    if size >= sizes[-1]:
        return seconds[sizes[-1]] * size / sizes[-1]
    upper = sizes[bisect_left(sizes, size)]
    lower = sizes[max(0, bisect_left(sizes, size) - 1)]
    part = 0.0 if upper == lower else (size - lower) / (upper - lower)
    return seconds[lower] + part * (seconds[upper] - seconds[lower])


@torch.inference_mode()
def batch_costs(engine: Engine, most: int) -> BatchCosts | None:
    """Measured for up to `most` texts. None where no depth is chosen by it, or texts go one after the other: then the
    engine's own costs hold, which are of a text alone."""
    forward, proposer = engine.forward, engine.proposer
    if not isinstance(proposer, AdaptiveProposer) or 1 in (most, forward.together):
        return None
    depths = range(1, engine.num_steps + 1)
    draft = {depth: {1: 0.0} for depth in depths}
    if proposer.draft is not None:
        draft = measure_drafting(forward, proposer.draft, depths, most)
    bucket = forward.rows
    if bucket is None:
        verify = measure_verify(forward, most * engine.drafting.rows(engine.num_steps))
    else:
        counts = [size for size in SIZES if size <= (forward.together or most)]
        verify = {count * bucket: seconds for count, seconds in measure_texts(forward, counts).items()}
    # A busy moment makes a time longer, never shorter: fewer rows cost no more than many.
    sizes = sorted(verify)
    least = {size: min(verify[other] for other in sizes if other >= size) for size in sizes}
    return BatchCosts(least, draft, engine.drafting, bucket, proposer.costs.row)


def measure_verify(forward: Forward, most: int) -> dict[int, float]:
    """Seconds by rows, head and argmax included, of the sizes up to the first that holds `most`."""
    sizes = SIZES[: bisect_left(SIZES, most) + 1]
    tokens = _tokens(forward, CONTEXT + sizes[-1])
    forward.cache.reserve(len(tokens))
    forward.prefill(tokens[:CONTEXT])

    def verify(rows: int) -> None:
        forward.logits(forward.verify(tokens[CONTEXT : CONTEXT + rows], CONTEXT)).argmax(dim=-1).tolist()

    return best_seconds(verify, sizes, TRIES)


def measure_drafting(
    forward: Forward, draft: Proposer, depths: Sequence[int], most: int
) -> dict[int, dict[int, float]]:
    """Seconds by depth and by texts, whose latest rounds gained two tokens each. Not in steps of a share: what is added
    up over texts must not be rounded before."""
    tokens = _tokens(forward, CONTEXT + 1)
    forward.cache.reserve(len(tokens))
    _, taps = forward.prefill(tokens[:CONTEXT])
    assert taps is not None, "a draft reads taps"
    counts = [size for size in SIZES if size <= most] if side_by_side(draft) else [1]
    forks = [draft.fork() for _ in range(counts[-1])]
    for fork in forks:
        fork.reserve(CONTEXT + 1)
        fork.begin()
        fork.observe(taps, tokens[1:], 0)
        fork.propose(1)

    def propose(depth: int, count: int) -> None:
        for fork in forks[:count]:
            fork.observe(taps[:, -2:], tokens[-2:], CONTEXT - 2)
        propose_texts([(fork, depth) for fork in forks[:count]])

    return {depth: best_seconds(partial(propose, depth), counts, TRIES if len(counts) == 1 else 2) for depth in depths}


def _tokens(forward: Forward, count: int) -> list[int]:
    size = forward.target.vocab_size
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
