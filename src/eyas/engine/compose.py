"""Settings to a proposer: the draft, n-gram lookup, or a choice among them and plain decoding."""

from dataclasses import dataclass, field

import torch
from torch import nn

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.costs import RoundCosts, measure_rounds
from eyas.engine.forward import Forward, check_rolls_back
from eyas.engine.graphed_draft import draft_runner
from eyas.engine.graphs import Recording
from eyas.engine.ngram import NgramProposer
from eyas.engine.propose import DraftProposer, Proposer, prepared
from eyas.engine.proposers import draft_proposer
from eyas.models.draft import Draft
from eyas.settings import DraftingSettings


@dataclass(frozen=True)
class Proposers:
    """What drafts (None: nothing), the draft in it if there is one, and the linears whose kernels were exchanged."""

    proposer: Proposer | None = None
    draft: DraftProposer | None = None
    linears: list[nn.Linear] = field(default_factory=list)
    costs: RoundCosts | None = None


def compose(
    forward: Forward,
    draft: Draft | None,
    drafting: DraftingSettings,
    kernels: str = "auto",
    costs: RoundCosts | None = None,
    dtype: torch.dtype | None = None,
    int8: bool = False,
    recording: Recording | None = None,
) -> Proposers:
    """`drafting.num_steps` is set; `costs` None: measured where something is chosen by them; `dtype`, `int8`: the
    draft's. The draft is compiled where the target is and where it can be; else `recording` says how its steps are
    recorded, if at all.

    Raises InputError for a draft that does not fit the target, and for a target that nothing can be drafted for.
    """
    assert drafting.num_steps is not None, "an engine knows its deepest round"
    first, linears = None, []
    if draft is not None or drafting.ngram:
        check_rolls_back(forward)
    if draft is not None:
        runner = draft_runner(prepared(draft, forward.target, dtype), forward, int8, recording)
        first = draft_proposer(runner, drafting)
        linears = first.settle(max(drafting.num_steps + 1, drafting.topk), kernels)
    second = NgramProposer(drafting.ngram) if drafting.ngram else None
    if drafting.adaptive or (first and second):
        costs = costs or measure_rounds(forward, first, drafting.num_steps)
        return Proposers(AdaptiveProposer(first, second, costs, not drafting.adaptive), first, linears, costs)
    return Proposers(first or second, first, linears)
