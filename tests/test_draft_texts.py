"""Chains that grow side by side are those that each text's draft would grow alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eyas.engine.adapt import AdaptiveProposer
from eyas.engine.costs import RoundCosts
from eyas.engine.draft_texts import draft_texts, propose_texts, side_by_side
from eyas.engine.generate import Engine
from eyas.engine.native_build import load_native
from eyas.engine.propose import DraftProposer
from eyas.engine.tree import Tree
from eyas.models.target import load_target
from eyas.settings import DraftingSettings
from test_adapt import MadeUpDraft
from test_engine import random_draft

ROWS = 160
PROMPTS = (5, 16, 17, 40, 90)
"""On both sides of what is written as a prompt."""
COSTS = RoundCosts({0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}, {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3})


@pytest.fixture(scope="module")
def engine(tiny_target: Path) -> Engine:
    if isinstance(load_native(), str):
        pytest.skip("no compiled kernels here")
    target = load_target(str(tiny_target))
    return Engine(target, random_draft(target), drafting=DraftingSettings(num_steps=4), announce=False)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Told:
    """A text whose draft hears of its rows in pieces."""

    def __init__(self, engine: Engine, prompt: int) -> None:
        assert isinstance(engine.proposer, DraftProposer)
        self.proposer, self.row, self.ids = engine.proposer.fork(), 0, ids(ROWS + 1, prompt)
        engine.forward.cache.reserve(ROWS)
        with torch.inference_mode():
            _, self.taps = engine.forward.prefill(self.ids[:ROWS])
        self.proposer.reserve(ROWS)
        self.proposer.begin()
        self.tell(prompt)

    def tell(self, rows: int) -> None:
        assert self.taps is not None
        last = self.row + rows
        self.proposer.observe(self.taps[:, self.row : last], self.ids[self.row + 1 : last + 1], self.row)
        self.row = last


@pytest.mark.parametrize("depths", [(3, 3, 3, 3, 3), (1, 4, 2, 4, 1)], ids=["equally deep", "each as deep as it likes"])
@torch.inference_mode()
def test_chains_side_by_side_are_those_of_each_alone(engine: Engine, depths: Sequence[int]) -> None:
    alone, beside = ([Told(engine, prompt) for prompt in PROMPTS] for _ in range(2))
    for told in (0, 2, 1, 4):  # 0: nothing since the prompt; after that rounds that gained so many
        for text in (*alone, *beside):
            text.tell(told) if told else None
        assert all(side_by_side(text.proposer) for text in beside)
        trees = propose_texts([(text.proposer, depth) for text, depth in zip(beside, depths, strict=True)])
        assert trees == [text.proposer.propose(depth) for text, depth in zip(alone, depths, strict=True)]
        assert [tree.depth for tree in trees] == list(depths)
        for one, other in zip(alone, beside, strict=True):
            rows = one.proposer.next_row
            assert rows == other.proposer.next_row == one.row
            for layer, keys in one.proposer.cache.keys.items():
                assert torch.equal(keys[:, :, :rows], other.proposer.cache.keys[layer][:, :, :rows])


@torch.inference_mode()
def test_only_compiled_chains_go_side_by_side_and_others_are_drafted_alone(engine: Engine) -> None:
    tree = DraftProposer(engine.proposer.forward.fork(), DraftingSettings(num_steps=2, topk=2))  # pyrefly: ignore
    unsure = DraftProposer(engine.proposer.forward.fork(), DraftingSettings(num_steps=2, stop_below=0.5))  # pyrefly: ignore
    plain = DraftProposer(engine.proposer.draft)  # pyrefly: ignore
    assert not any(map(side_by_side, (tree, unsure, plain, MadeUpDraft())))
    first, second = Told(engine, 5), Told(engine, 9)
    trees = propose_texts([(first.proposer, 2), (MadeUpDraft(), 3), (second.proposer, 1)])
    assert [tree.depth for tree in trees] == [2, 3, 1] and trees[1].tokens == (7, 7, 7)


class Waiting:
    """A text as far as drafting looks at it."""

    num_steps = 3

    def __init__(self, proposer: object) -> None:
        self.proposer = proposer


def test_of_texts_that_choose_the_one_least_behind_makes_the_try() -> None:
    first = AdaptiveProposer(MadeUpDraft(), None, COSTS)
    texts = [Waiting(first.fork()) for _ in range(3)]
    for text, prompt in zip(texts, (90, 20, 50), strict=True):
        text.proposer.begin()
        text.proposer.observe(None, ids(prompt, prompt), 0)
    arm = first._arm("draft")
    for _ in range(30):
        arm.survival.learn(1, 0)
    arm.aside, arm.credit = 1000.0, 1.0
    trees = draft_texts([*texts, Waiting(None)])  # pyrefly: ignore
    assert [tree.depth for tree in trees] == [0, 1, 0, 0]
    for text in texts:
        text.proposer.observe(None, [9], 100)
    assert [bool(tree.tokens) for tree in draft_texts(texts)] == [False, True, False]  # pyrefly: ignore


def test_what_a_chooser_takes_from_elsewhere_is_not_drafted() -> None:
    assert draft_texts([]) == [] and propose_texts([]) == []
    assert draft_texts([Waiting(None), Waiting(MadeUpDraft())])[0] == Tree()  # pyrefly: ignore
