"""The choice of who drafts and how deep, against a made-up engine whose costs and acceptance are known."""

import random
from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from eyas.engine.adapt import FIRST, MOST_CREDIT, PART, SHARE, AdaptiveProposer, Arm, Survival, needed
from eyas.engine.costs import RoundCosts
from eyas.engine.ngram import NgramProposer
from eyas.engine.tree import Tree, chain

COSTS = RoundCosts({0: 1.0, 1: 1.2, 2: 1.35, 3: 1.5, 4: 2.2}, {0: 1.0, 1: 1.1, 2: 1.15, 3: 1.2, 4: 1.8})


class MadeUpDraft:
    """Drafts a chain of nonsense; what is accepted is decided elsewhere."""

    def fork(self) -> "MadeUpDraft":
        return self

    def reserve(self, rows: int) -> None: ...

    def begin(self) -> None: ...

    def observe(self, taps_BRA: Tensor | None, ids: Sequence[int], start: int) -> None: ...

    def propose(self, num_steps: int) -> Tree:
        return chain([7] * num_steps)


def run(
    proposer: AdaptiveProposer, rate: Callable[[int], float], rounds: int, seed: int = 0
) -> tuple[list[int], float]:
    """(depths, cost of a token) where every drafted token of round i is accepted with probability rate(i)."""
    rng, depths, tokens, cost, start = random.Random(seed), [], 0, 0.0, 0
    proposer.begin()
    for index in range(rounds):
        depth = proposer.propose(4).depth
        accepted = next((level for level in range(depth) if rng.random() >= rate(index)), depth)
        proposer.observe(None, [9] * (accepted + 1), start)
        start += accepted + 1
        depths.append(depth)
        tokens += accepted + 1
        cost += COSTS.draft[depth]
    return depths, cost / tokens


def adaptive() -> AdaptiveProposer:
    return AdaptiveProposer(MadeUpDraft(), None, COSTS)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.1])
def test_a_bad_draft_costs_less_than_three_percent(rate: float, seed: int) -> None:
    depths, cost = run(adaptive(), lambda index: rate, 1500, seed)
    assert cost < 1 / 0.97
    assert depths.count(0) > 1350


def test_of_eight_texts_one_tries_a_bad_draft_and_ever_more_seldom() -> None:
    """A text's first drafting in a while catches up with all of it, which is what tries cost."""
    first = adaptive()
    texts = [first.fork() for _ in range(8)]
    drafting = dict[int, list[int]]()
    for text in texts:
        text.begin()
    for index in range(800):
        for text in texts:
            text.price(COSTS, len(texts))
        trees = [text.propose(4) for text in texts]
        for text in texts:
            text.observe(None, [9], 0)
        if any(tree.tokens for tree in trees):
            drafting[index] = [place for place, tree in enumerate(trees) if tree.tokens]
    assert drafting.pop(0) == list(range(8)), "hope before anything is known"
    # After 16, 32, ... 256 rounds of all texts, over the 0.764 that may be refused at these costs.
    tries = {22: 1, 69: 4, 159: 1, 333: 2, 676: 2}
    assert drafting == {start + step: [text] for start, text in tries.items() for step in range(6)}


def test_a_text_that_ends_in_a_try_leaves_the_next_to_another() -> None:
    arm = Arm(aside=16)
    arm.turn("first", run=True, best=False)
    assert arm.due("first") and not arm.due("second")
    for _ in range(32):
        assert not arm.due("second")
        arm.turn("second", run=False, best=False)
    assert arm.due("second")


def lost_to_a_useless_draft(costs: RoundCosts, texts: int, prompt: int, tokens: int) -> list[float]:
    """Plain steps that each text loses, one after the other."""
    proposer, lost = AdaptiveProposer(MadeUpDraft(), None, costs), []
    for _ in range(texts):
        proposer.begin()
        proposer.observe(None, [9] * prompt, 0)
        behind = prompt
        lost.append(0.0)
        for start in range(prompt, prompt + tokens - 1):
            depth = proposer.propose(2).depth
            if depth:
                lost[-1] += costs.draft[depth] - 1 + max(0, behind - 2) * costs.row
                behind = 0
            proposer.observe(None, [9], start)
            behind += 1
    return lost


DEAR = {
    "cheap chain": (1.05, 0.0),
    "chain": (1.15, 0.003),
    "int8 tree": (1.65, 0.004),
    "dear draft, dear prompts": (2.5, 0.03),
}


@pytest.mark.parametrize(("depth_1", "row"), DEAR.values(), ids=DEAR)
@pytest.mark.parametrize("tokens", [32, 48, 96, 256])
@pytest.mark.parametrize("prompt", [10, 70, 400])
def test_no_text_loses_more_than_2_1_percent_to_a_useless_draft_whatever_its_price(
    depth_1: float, row: float, tokens: int, prompt: int
) -> None:
    costs = RoundCosts({0: 1.0, 1: depth_1, 2: 2 * depth_1}, {0: 1.0, 1: 1.1, 2: 1.2}, row)
    lost = lost_to_a_useless_draft(costs, 60, prompt, tokens)
    assert max(lost) <= FIRST + SHARE * tokens
    assert max(lost) < 0.021 * tokens
    assert sum(lost[10:]) < (PART + 0.002) * 50 * tokens, "all of them together lose less"


def test_no_try_begins_in_debt() -> None:
    arm = Arm(patience=4)
    arm.charge(1.515, 0)
    waited = 0
    while not arm.due("text"):
        arm.turn("text", run=False, best=False)
        waited += 1
    assert waited == 152  # 1.515 plain steps at 0.01 a round
    arm.charge(-1.8, 2)
    assert arm.debt == 0, "gains pay debts, and no debt to come"


def test_a_token_accepted_is_credit_for_a_step_lost() -> None:
    arm = Arm()
    assert arm.charge(0.2, 0) == 0.2, "nobody has seen it right"
    assert arm.charge(-0.8, 1) == 0 and arm.credit == 1
    assert arm.charge(0.5, 0) == 0 and arm.credit == 0.5
    assert arm.charge(0.7, 0) == pytest.approx(0.2) and arm.credit == 0
    for _ in range(9):
        arm.charge(-1.0, 2)
    assert arm.credit == MOST_CREDIT


@pytest.mark.parametrize(
    ("seconds", "least"),
    [
        ({0: 1.0, 1: 1.2}, 0.236),  # 1 + a > 1.03 * 1.2
        ({0: 1.0, 1: 1.5, 2: 1.6}, 0.448),  # 1 + a + a^2 > 1.03 * 1.6
        ({0: 1.0, 1: 1.9}, 0.957),
        ({0: 1.0, 1: 1.95, 2: 2.95}, 1.0),  # not even 2 and 3 tokens do
    ],
)
def test_what_must_stand_for_drafting_to_pay_is_read_off_the_costs(seconds: dict[int, float], least: float) -> None:
    assert needed(seconds, [depth for depth in seconds if depth]) == pytest.approx(least, abs=0.01)


def test_the_more_must_stand_the_longer_a_draft_is_left_aside_and_what_cannot_pay_is_never_tried() -> None:
    tries = []
    for depth_1 in (1.1, 1.5, 1.8, 2.2):
        proposer = AdaptiveProposer(MadeUpDraft(), None, RoundCosts({0: 1.0, 1: depth_1}, {0: 1.0, 1: depth_1}))
        proposer.begin()
        proposer.arms["draft"] = Arm(aside=1.0)
        for _ in range(40):
            proposer.arms["draft"].survival.learn(1, 0)
        waited = 0
        while not proposer.propose(1).tokens and waited < 1000:
            proposer.observe(None, [9], waited)
            waited += 1
        tries.append(waited)
    # 16 rounds over the part that may be refused, 0.86, 0.45 and 0.14; the last would need more than all.
    assert tries == [18, 35, 113, 1000]


def test_nothing_is_known_after_forgetting() -> None:
    first = adaptive()
    second = first.fork()
    run(first, lambda index: 0.0, 200)
    assert second.propose(4).depth == 0
    first.forget()
    second.begin()
    assert second.propose(4).depth == 1


def test_a_source_is_first_tried_at_its_shallowest() -> None:
    proposer = adaptive()
    proposer.begin()
    assert proposer.propose(4).depth == 1
    proposer.observe(None, [9, 9], 0)
    assert proposer.propose(4).depth == 3


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9])
def test_a_good_draft_runs_near_its_best_depth(rate: float) -> None:
    _, cost = run(adaptive(), lambda index: rate, 1500)
    best = min(COSTS.draft[d] / sum(rate**level for level in range(d + 1)) for d in range(5))
    assert cost < 1.08 * best


def test_a_draft_that_turns_good_is_found_again_and_one_that_turns_bad_is_left() -> None:
    depths, _ = run(adaptive(), lambda index: 0.9 if 1000 <= index < 1600 else 0.0, 2200)
    assert depths[900:1000].count(0) >= 94, "one try at most"
    assert depths[1300:1600].count(0) < 30
    assert depths[1700:].count(0) > 450


def test_the_same_texts_give_the_same_rounds() -> None:
    assert run(adaptive(), lambda index: 0.5, 400) == run(adaptive(), lambda index: 0.5, 400)


def test_survival_remembers_late_rounds_and_hopes_for_deeper_levels() -> None:
    survival = Survival()
    assert survival.gained(2) == pytest.approx([1.0, 1.6, 1.96])
    survival.learn(drafted=2, accepted=1)
    # Level 1: (1 + 2 * 0.6) / 3; level 2: (0 + 2 * level 1) / 3; level 3, never tried, as level 2.
    first, second = 2.2 / 3, 4.4 / 9
    assert survival.gained(3) == pytest.approx(
        [1.0, 1 + first, 1 + first + first * second, 1 + first + first * second + first * second**2]
    )
    for _ in range(200):
        survival.learn(drafted=1, accepted=1)
    gained = survival.gained(2)
    assert gained[1] == pytest.approx(1.98, abs=0.03)
    assert gained[2] - gained[1] == pytest.approx(0.97, abs=0.05), "a level long untried is hoped for again"


def test_patience_doubles_with_vain_tries_and_returns_with_success() -> None:
    arm = Arm()
    for patience in (16, 32, 64, 128, 256, 256):
        for _ in range(patience):
            assert not arm.due("text")
            arm.turn("text", run=False, best=False)
        for _ in range(6):
            assert arm.due("text")
            arm.turn("text", run=True, best=False)
    for _ in range(16):
        arm.turn("text", run=True, best=True)
    assert arm.patience == 16


@pytest.mark.parametrize("fixed", [False, True])
def test_ngrams_are_used_where_they_beat_the_draft(fixed: bool) -> None:
    proposer = AdaptiveProposer(MadeUpDraft(), NgramProposer(3), COSTS, fixed)
    proposer.begin()
    loop = [1, 2, 3, 4, 5]
    proposer.observe(None, loop * 2, 0)
    start, by_ngram = 10, []
    for _ in range(200):  # the text is a loop: matches are always right, the draft's 7 never
        tree = proposer.propose(4)
        right = [loop[(start + step) % 5] for step in range(5)]
        accepted = next((i for i, token in enumerate(tree.tokens) if token != right[i]), tree.depth)
        proposer.observe(None, right[: accepted + 1], start)
        start += accepted + 1
        by_ngram.append(bool(tree.tokens) and tree.tokens[0] != 7)
    assert sum(by_ngram[50:]) > 125
    assert proposer.arms["ngram 3"].survival.gained(1)[1] > 1.9
    assert proposer.arms["draft"].survival.gained(1)[1] < 1.4
