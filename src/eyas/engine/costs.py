"""What a round costs here, by depth: of a plain step, of verifying k drafted tokens, of drafting them.

`measure_costs` asks it of a target and a draft before there is an engine, `measure_rounds` of an engine's own parts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from eyas.engine.forward import Forward, check_rolls_back
from eyas.engine.graphed_draft import draft_runner
from eyas.engine.graphs import recording_for
from eyas.engine.linear import fastest_kernels, install, uninstall
from eyas.engine.propose import DraftProposer, prepared
from eyas.engine.proposers import draft_proposer
from eyas.engine.settle import layer_linears
from eyas.engine.start import start
from eyas.engine.tree import Tree, chain
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
def measure_costs(
    target: Target, draft: Draft, depths: Sequence[int], *, int8: bool = False, draft_int8: bool = False
) -> StepCosts:
    """Time every depth in turn, several times over, so that a busy moment of the machine strikes all alike."""
    most = max(depths) + 1
    counts = sorted({1, *(depth + 1 for depth in depths)})
    layers, head = layer_linears(target), [target.head]
    recording = recording_for(target.model.device)
    forward, facts = start(target, draft.config.boundaries, most, int8=int8, recording=recording)
    if not forward.rolls_back:
        forward.close()
    check_rolls_back(forward)
    forward.rows = None
    if facts.path != "compiled" and not int8:
        for group in (layers, head):
            install(group, fastest_kernels(group, counts))
    proposer = draft_proposer(draft_runner(prepared(draft, target), forward, draft_int8, recording))
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
        rows = best_seconds(verify, counts)
        return StepCosts(rows[1], {depth: rows[depth + 1] for depth in depths}, best_seconds(propose, depths))
    finally:
        forward.close()
        uninstall([*layers, *head, *drafting])


USUAL_ROWS = 2
"""Rows that the price of drafting holds: the last token's and one accepted one's."""
GRAIN = 0.05
"""Costs are told in steps of this share of a plain step, so that most starts of an engine find the same."""


@dataclass(frozen=True)
class RoundCosts:
    """Cost of a round by depth, a plain step (depth 0) being 1. `ngram` leaves the draft's own work out."""

    draft: Mapping[int, float]
    ngram: Mapping[int, float]
    row: float = 0.0
    """Of every row beyond USUAL_ROWS that the draft catches up on, a text's prompt for one."""


def measure_rounds(forward: Forward, draft: DraftProposer | None, num_steps: int) -> RoundCosts:
    """Time the rounds of an engine that is ready to generate, with its own kernels and row bucket."""
    rows = CONTEXT + num_steps + 1
    ids = torch.randint(forward.target.vocab_size, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    forward.cache.reserve(rows)
    _, taps = forward.prefill(ids[:CONTEXT])
    trees: dict[int, Tree] = {}

    def propose(depth: int) -> None:
        assert draft is not None and taps is not None, "only a draft's work is timed"
        draft.observe(taps[:, -2:], ids[CONTEXT - 1 : CONTEXT + 1], CONTEXT - 2)
        trees[depth] = draft.propose(depth)

    def verify(tree: Tree) -> None:
        states = forward.verify([ids[CONTEXT], *tree.tokens], CONTEXT, tree.row_parents)
        forward.logits(states).argmax(dim=-1).tolist()

    depths = range(num_steps + 1)
    drafting, behind = dict.fromkeys(depths, 0.0), 0.0
    if draft is not None:
        assert taps is not None, "a draft reads taps"
        draft.reserve(rows)
        draft.begin()
        draft.observe(taps, ids[1 : CONTEXT + 1], 0)
        drafting |= best_seconds(propose, depths[1:])

        def catch_up(rows: int) -> None:
            draft.begin()
            draft.observe(taps[:, :rows], ids[1 : rows + 1], 0)
            draft.propose(1)

        both = best_seconds(catch_up, (USUAL_ROWS, CONTEXT), tries=3)
        behind = max(0.0, both[CONTEXT] - both[USUAL_ROWS])
    chains = {depth: chain(ids[CONTEXT + 1 :][:depth]) for depth in depths}
    chain_seconds = best_seconds(lambda depth: verify(chains[depth]), depths)
    trees = {depth: trees.get(depth, chains[depth]) for depth in depths}
    branched = any(not tree.is_chain for tree in trees.values())
    tree_seconds = best_seconds(lambda depth: verify(trees[depth]), depths) if branched else chain_seconds

    def share(seconds: float) -> float:
        return round(max(1, round(seconds / chain_seconds[0] / GRAIN)) * GRAIN, 6)

    return RoundCosts(
        {depth: share(drafting[depth] + tree_seconds[depth]) if depth else 1.0 for depth in depths},
        {depth: share(chain_seconds[depth]) for depth in depths},
        round(share(behind) / (CONTEXT - USUAL_ROWS), 6) if behind else 0.0,
    )


def best_seconds(work: Callable[[int], None], sizes: Sequence[int], tries: int = TRIES) -> dict[int, float]:
    """Seconds by size, the best of a few tries, in turn.

    Of this thread alone where it does all the work: on a busy machine the clock made rounds three times as dear as they
    are, and nothing was drafted.
    """
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_initialized()
    clock = time.thread_time if alone else time.perf_counter
    seconds = dict.fromkeys(sizes, float("inf"))
    for _ in range(tries):
        for size in sizes:
            started = clock()
            work(size)
            seconds[size] = min(seconds[size], clock() - started)
    return seconds
