"""What a round costs with several texts side by side: the depth that pays for one may not pay for eight.

A forward over few rows is bound by reading the weights, over many by multiplying: drafted rows are nearly free for one
text and cost nearly as much as the tokens they stand for where many texts fill a forward anyway.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.costs import CONTEXT, RoundCosts, best_seconds
from eyas.engine.forward import Forward
from eyas.engine.generate import Engine
from eyas.engine.propose import Proposer
from eyas.engine.together import measure_texts
from eyas.settings import DraftingSettings

SIZES, TRIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), 3


@dataclass(frozen=True)
class BatchCosts:
    """Seconds of verify forwards by rows, and of drafting by depth, one text after the other."""

    verify: dict[int, float]
    draft: dict[int, float]
    drafting: DraftingSettings
    bucket: int | None = None
    """Rows that a text takes however deep it drafts (the plain path); None: as many as it verifies."""

    def of(self, texts: int) -> RoundCosts:
        """Of a round in which so many texts draft equally deep, a plain one being 1."""
        plain = self._rows(texts, 1)
        depths = self.draft.keys()
        trees = {depth: self._rows(texts, self.drafting.rows(depth)) + texts * self.draft[depth] for depth in depths}
        chains = {depth: self._rows(texts, depth + 1) for depth in depths}
        return RoundCosts(
            {0: 1.0} | {depth: seconds / plain for depth, seconds in trees.items()},
            {0: 1.0} | {depth: seconds / plain for depth, seconds in chains.items()},
        )

    def _rows(self, texts: int, verified: int) -> float:
        """Between two sizes that were measured on the line through them, beyond the largest in its proportion."""
        rows, sizes = texts * (self.bucket or verified), sorted(self.verify)
        if rows >= sizes[-1]:
            return self.verify[sizes[-1]] * rows / sizes[-1]
        upper = sizes[bisect_left(sizes, rows)]
        lower = sizes[max(0, bisect_left(sizes, rows) - 1)]
        part = 0.0 if upper == lower else (rows - lower) / (upper - lower)
        return self.verify[lower] + part * (self.verify[upper] - self.verify[lower])


@torch.inference_mode()
def batch_costs(engine: Engine, most: int) -> BatchCosts | None:
    """Measured for up to `most` texts. None where no depth is chosen by it, or texts go one after the other."""
    forward, proposer = engine.forward, engine.proposer
    if not isinstance(proposer, AdaptiveProposer) or forward.together == 1:
        return None
    depths = range(1, engine.num_steps + 1)
    draft = dict.fromkeys(depths, 0.0)
    if proposer.draft is not None:
        draft = measure_drafting(forward, proposer.draft.fork(), depths)
    bucket = forward.rows
    if bucket is None:
        verify = measure_verify(forward, most * engine.drafting.rows(engine.num_steps))
    else:
        counts = [size for size in SIZES if size <= (forward.together or most)]
        verify = {count * bucket: seconds for count, seconds in measure_texts(forward, counts).items()}
    # A busy moment makes a time longer, never shorter: fewer rows cost no more than many.
    sizes = sorted(verify)
    least = {size: min(verify[other] for other in sizes if other >= size) for size in sizes}
    return BatchCosts(least, draft, engine.drafting, bucket)


def measure_verify(forward: Forward, most: int) -> dict[int, float]:
    """Seconds by rows, head and argmax included, of the sizes up to the first that holds `most`."""
    sizes = SIZES[: bisect_left(SIZES, most) + 1]
    tokens = _tokens(forward, CONTEXT + sizes[-1])
    forward.cache.reserve(len(tokens))
    forward.prefill(tokens[:CONTEXT])

    def verify(rows: int) -> None:
        forward.logits(forward.verify(tokens[CONTEXT : CONTEXT + rows], CONTEXT)).argmax(dim=-1).tolist()

    return best_seconds(verify, sizes, TRIES)


def measure_drafting(forward: Forward, draft: Proposer, depths: Sequence[int]) -> dict[int, float]:
    """Seconds by depth, of a text whose latest round gained two tokens. Not in steps of a share: what is added up over
    texts must not be rounded before."""
    tokens = _tokens(forward, CONTEXT + 1)
    forward.cache.reserve(len(tokens))
    _, taps = forward.prefill(tokens[:CONTEXT])
    assert taps is not None, "a draft reads taps"
    draft.reserve(CONTEXT + 1)
    draft.begin()
    draft.observe(taps, tokens[1:], 0)

    def propose(depth: int) -> None:
        draft.observe(taps[:, -2:], tokens[-2:], CONTEXT - 2)
        draft.propose(depth)

    return best_seconds(propose, depths, TRIES)


def _tokens(forward: Forward, count: int) -> list[int]:
    size = forward.target.vocab_size
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
