"""What a round costs here, by depth: seconds of a plain step, of verifying k drafted tokens, of drafting them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.engine.forward import TargetForward
from eyas.engine.linear import fastest_kernels, install, uninstall
from eyas.engine.propose import ChainProposer, prepared
from eyas.engine.settle import layer_linears
from eyas.models.draft import Draft
from eyas.models.target import Target

CONTEXT, TRIES = 128, 7


@dataclass(frozen=True)
class StepCosts:
    """Seconds, best of a few tries, at a context of CONTEXT tokens, each row count with its own fastest kernels."""

    plain: float
    """One row through the target, head and argmax included."""
    verify: dict[int, float]
    """Number of drafted tokens to the seconds of verifying them (one row more)."""
    draft: dict[int, float]
    """Number of drafted tokens to the seconds of drafting them and of rewriting the draft's rows afterwards."""

    def round(self, num_steps: int) -> float:
        return self.verify[num_steps] + self.draft[num_steps]


@torch.inference_mode()
def measure_costs(target: Target, draft: Draft, depths: Sequence[int]) -> StepCosts:
    """Time every depth in turn, several times over, so that a busy moment of the machine strikes all alike."""
    most = max(depths) + 1
    counts = sorted({1, *(depth + 1 for depth in depths)})
    layers, head = layer_linears(target), [target.head]
    for group in (layers, head):
        install(group, fastest_kernels(group, counts))
    forward = TargetForward(target, draft.config.boundaries)
    proposer = ChainProposer(prepared(draft, target))
    drafting = proposer.settle(most)
    ids = torch.randint(target.vocab_size, (CONTEXT + most,), generator=torch.Generator().manual_seed(0)).tolist()
    forward.cache.reserve(CONTEXT + most)
    proposer.cache.reserve(CONTEXT + most)
    _, taps = forward.prefill(ids[:CONTEXT])
    assert taps is not None
    proposer.observe(taps, ids[1 : CONTEXT + 1], 0)

    def verify(rows: int) -> None:
        logits = forward.logits(forward.verify(ids[CONTEXT : CONTEXT + rows], CONTEXT))
        logits.argmax(dim=-1).tolist()

    def propose(depth: int) -> None:
        # Rewriting two rows is the common case: the last token's and one accepted one's.
        proposer.observe(taps[:, -2:], ids[CONTEXT - 1 : CONTEXT + 1], CONTEXT - 2)
        proposer.propose(depth)

    try:
        rows = _best(verify, counts)
        return StepCosts(rows[1], {depth: rows[depth + 1] for depth in depths}, _best(propose, depths))
    finally:
        forward.close()
        uninstall([*layers, *head, *drafting])


def _best(work: Callable[[int], None], sizes: Sequence[int]) -> dict[int, float]:
    seconds = dict.fromkeys(sizes, float("inf"))
    for _ in range(TRIES):
        for size in sizes:
            started = time.perf_counter()
            work(size)
            seconds[size] = min(seconds[size], time.perf_counter() - started)
    return seconds
