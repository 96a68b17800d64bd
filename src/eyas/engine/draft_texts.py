"""Drafting for several texts: each chooses how deep, and the chains of one draft grow side by side, a level a forward.

A draft's forward over a row or two is bound by reading its weights, as the target's is, and its head is most of them:
eight texts one after the other read them eight times a level. Compiled rows do not depend on what stands beside them,
so every text gets the chain that it would get alone (tests/test_draft_texts.py).

Shapes: N texts, R rows of all of them, A width of the taps, H hidden, D draft vocabulary.
"""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from eyas.engine.adapt import PLAIN, AdaptiveProposer
from eyas.engine.draft_forward import PROMPT_ROWS, NativeDraft
from eyas.engine.propose import DraftProposer, Proposer
from eyas.engine.rows import TextRows
from eyas.engine.text import Text
from eyas.engine.tree import Tree, chain


def draft_texts(texts: Sequence[Text]) -> list[Tree]:
    """What the next round of each verifies; an empty tree is a plain step."""
    trees = [PLAIN] * len(texts)
    asked: list[tuple[int, Proposer, int]] = []
    for index in _order(texts):
        proposer, num_steps = texts[index].proposer, texts[index].num_steps
        if isinstance(proposer, AdaptiveProposer):
            choice = proposer.choose(num_steps)
            if isinstance(choice, Tree):
                trees[index] = choice
            elif proposer.draft is not None:
                asked.append((index, proposer.draft, choice))
        elif proposer is not None:
            asked.append((index, proposer, num_steps))
    drafted = propose_texts([(proposer, depth) for _, proposer, depth in asked])
    for (index, *_), tree in zip(asked, drafted, strict=True):
        chooser = texts[index].proposer
        trees[index] = chooser.drafted(tree) if isinstance(chooser, AdaptiveProposer) else tree
    return trees


def _order(texts: Sequence[Text]) -> Sequence[int]:
    """Those first that a draft has least to catch up with: the first whom a try is offered makes it."""

    def behind(index: int) -> int:
        proposer = texts[index].proposer
        return proposer.behind if isinstance(proposer, AdaptiveProposer) else 0

    return sorted(range(len(texts)), key=behind)


def propose_texts(asked: Sequence[tuple[Proposer, int]]) -> list[Tree]:
    """The tree of each (proposer, levels), side by side where that can be."""
    together = [proposer for proposer, _ in asked if side_by_side(proposer)]
    if len(together) < 2:
        return [proposer.propose(depth) for proposer, depth in asked]
    grown = iter(_chains(together, [depth for proposer, depth in asked if side_by_side(proposer)]))
    return [next(grown) if side_by_side(proposer) else proposer.propose(depth) for proposer, depth in asked]


def side_by_side(proposer: Proposer) -> TypeGuard[DraftProposer]:
    """Whether its chains can grow in one forward with others'."""
    if type(proposer) is not DraftProposer or not isinstance(proposer.forward, NativeDraft):
        return False
    return proposer.drafting.topk == 1 and not proposer.drafting.stop_below


def _chains(proposers: Sequence[DraftProposer], depths: Sequence[int]) -> list[Tree]:
    forward = proposers[0].forward
    assert isinstance(forward, NativeDraft), "side by side is compiled"
    _catch_up(forward, proposers)
    drafted: list[list[int]] = [[] for _ in proposers]
    hidden_1NH = torch.cat([proposer.last for proposer in proposers], dim=1)
    growing = list(range(len(proposers)))
    for step in range(max(depths)):
        logits_ND = forward.logits(hidden_1NH)[0]
        for index, token in zip(growing, forward.draft.target_ids(logits_ND.argmax(dim=-1)).tolist(), strict=True):
            drafted[index].append(token)
        going = [place for place, index in enumerate(growing) if depths[index] > step + 1]
        growing = [growing[place] for place in going]
        if not growing:
            break
        rows = [TextRows(proposers[i].cache, drafted[i][-1:], proposers[i].next_row + step) for i in growing]
        hidden_1NH = forward.decoder.run(rows, forward.feedback(hidden_1NH[:, going])).last
    return [chain(tokens) for tokens in drafted]


def _catch_up(forward: NativeDraft, proposers: Sequence[DraftProposer]) -> None:
    """Write the rows that each was told of; many rows of one text have products of their own."""
    told: list[tuple[DraftProposer, Tensor, list[int]]] = []
    for proposer in proposers:
        if proposer.rows_told > PROMPT_ROWS:
            proposer.write()
        elif proposer.rows_told:
            told.append((proposer, *proposer.told()))
    if not told:
        return
    state_1RH = forward.fuse(torch.cat([taps for _, taps, _ in told], dim=1))
    rows = [TextRows(proposer.cache, ids, proposer.next_row) for proposer, _, ids in told]
    last_1RH = forward.decoder.run(rows, state_1RH).last
    for (proposer, _, ids), own in zip(told, last_1RH.split([len(ids) for _, _, ids in told], dim=1), strict=True):
        proposer.wrote(own[:, -1:], len(ids))
