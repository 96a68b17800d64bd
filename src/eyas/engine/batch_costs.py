"""What a round costs with several texts side by side: the depth that pays for one may not pay for eight.

A forward over few rows is bound by reading the weights, over many by multiplying: drafted rows are nearly free for one
text and cost nearly as much as the tokens they stand for where many texts fill a forward anyway.
"""

from bisect import bisect_left
from dataclasses import dataclass

import torch

from eyas.engine.costs import CONTEXT, RoundCosts, best_seconds
from eyas.engine.forward import Forward
from eyas.engine.generate import Engine
from eyas.settings import DraftingSettings

SIZES, TRIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), 3


@dataclass(frozen=True)
class BatchCosts:
    """Seconds of verify forwards by rows, and of drafting by depth, one text after the other."""

    verify: dict[int, float]
    draft: dict[int, float]
    drafting: DraftingSettings

    def of(self, texts: int) -> RoundCosts:
        """Of a round in which so many texts draft equally deep, a plain one being 1."""
        plain = self._rows(texts)
        depths = self.draft.keys()
        drafted = {depth: self._rows(texts * self.drafting.rows(depth)) + texts * self.draft[depth] for depth in depths}
        chains = {depth: self._rows(texts * (depth + 1)) for depth in depths}
        return RoundCosts(
            {0: 1.0} | {depth: seconds / plain for depth, seconds in drafted.items()},
            {0: 1.0} | {depth: seconds / plain for depth, seconds in chains.items()},
        )

    def _rows(self, rows: int) -> float:
        """Between two sizes that were measured on the line through them, beyond the largest in its proportion."""
        sizes = sorted(self.verify)
        if rows >= sizes[-1]:
            return self.verify[sizes[-1]] * rows / sizes[-1]
        upper = sizes[bisect_left(sizes, rows)]
        lower = sizes[max(0, bisect_left(sizes, rows) - 1)]
        part = 0.0 if upper == lower else (rows - lower) / (upper - lower)
        return self.verify[lower] + part * (self.verify[upper] - self.verify[lower])


def batch_costs(engine: Engine, most: int) -> BatchCosts | None:
    """Measured for up to `most` texts. None where no depth is chosen by it, or texts go one after the other."""
    if engine.costs is None or not engine.forward.side_by_side:
        return None
    verify = measure_verify(engine.forward, most * engine.drafting.rows(engine.num_steps))
    unit = verify[1]
    costs, depths = engine.costs, range(1, engine.num_steps + 1)
    # What the engine measured holds the verify forward of a chain; what remains of it is drafting.
    draft = {depth: max(0.0, costs.draft[depth] - costs.ngram[depth]) * unit for depth in depths}
    return BatchCosts(verify, draft, engine.drafting)


@torch.inference_mode()
def measure_verify(forward: Forward, most: int) -> dict[int, float]:
    """Seconds by rows, head and argmax included, of the sizes up to the first that holds `most`."""
    sizes = SIZES[: bisect_left(SIZES, most) + 1]
    ids = torch.randint(forward.target.vocab_size, (CONTEXT + sizes[-1],), generator=torch.Generator().manual_seed(0))
    tokens = ids.tolist()
    forward.cache.reserve(len(tokens))
    forward.prefill(tokens[:CONTEXT])

    def verify(rows: int) -> None:
        forward.logits(forward.verify(tokens[CONTEXT : CONTEXT + rows], CONTEXT)).argmax(dim=-1).tolist()

    return best_seconds(verify, sizes, TRIES)
