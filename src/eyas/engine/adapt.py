"""Who drafts the next round, and how deep: chosen by what was lately accepted and by what rounds cost here.

Every source of drafted tokens is an arm: the draft, and n-gram matches by their length. An arm keeps how often level i
was accepted once level i - 1 was, over its late rounds; from that and the cost of a round follow the tokens a second of
every depth, and the best of arms, depths and plain decoding is run. An arm is first tried at its shallowest, and one
left aside is tried again after a while, which doubles with every try that brought nothing. What its rounds lost
against plain decoding, the draft's catching up included, is a debt of which every round pays off PART of a plain step,
and no try begins in debt; and no round is drafted whose whole loss a text could not pay (FIRST). The more of its tokens
would have to be accepted for it to pay, the longer a source is left aside, and for good where costs say that all of
them would not do (many texts side by side). Of several texts one makes the try, since a draft has all of a text to
catch up with before it drafts for it. Costs are measured once, before the first text; after that the same texts give
the same rounds, whatever the clock says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from eyas.engine.costs import USUAL_ROWS, RoundCosts
from eyas.engine.ngram import NgramProposer
from eyas.engine.propose import Proposer
from eyas.engine.tree import Tree

FORGET = 0.97
"""A round counts this much of the one after it: about 33 rounds are remembered."""
HOPE, WEIGHT = 0.6, 2.0
"""Before anything is known the first level is accepted so often, counted as so many rounds; a deeper one as often as
the level before it."""
PATIENCE, MOST_PATIENCE = 16, 256
"""Rounds until an arm left aside is tried again, at first and at most."""
MARGIN = 1.03
"""Drafting must promise so much more than plain decoding: costs and acceptance are estimates."""
BISECTIONS = 7
TRY, FADE = 6, 0.25
"""Rounds of a try, and what its outcome leaves of what was known before."""
PART = 0.01
"""Of a plain step, what every round sets aside for an arm's next try."""
FIRST, SHARE, MOST_CREDIT = 0.35, 0.01, 5.0
"""Plain steps that a text may lose to drafting beyond an arm's credit: at first, and more with every round of the text;
and the most credit that an arm has. So a text of 32 tokens or more keeps 98 % of plain decoding's speed with a source
that is never right, by the costs measured at start and whatever they are: what it cannot pay is not run."""
LONGEST_CLASS = 4
"""n-gram matches of this length and longer are one arm."""
PLAIN = Tree()


@dataclass
class Survival:
    """Acceptance of each level given the one before it, the latest rounds weighing most."""

    hits: list[float] = field(default_factory=list)
    tries: list[float] = field(default_factory=list)
    version: int = 0
    """Grows with everything that is learnt."""

    def learn(self, drafted: int, accepted: int) -> None:
        """A round drafted so many levels and accepted so many. Levels it did not reach fade towards the one before."""
        self.version += 1
        missing = max(0, drafted - len(self.tries))
        self.hits += [0.0] * missing
        self.tries += [0.0] * missing
        for level in range(len(self.tries)):
            reached = level < drafted and level <= accepted
            self.tries[level] = FORGET * self.tries[level] + reached
            self.hits[level] = FORGET * self.hits[level] + (reached and level < accepted)

    def fade(self) -> None:
        """Let what comes next count for more."""
        self.version += 1
        self.hits = [FADE * hits for hits in self.hits]
        self.tries = [FADE * tries for tries in self.tries]

    def gained(self, depth: int) -> list[float]:
        """Expected tokens of a round of 0, 1, ... `depth` levels, the bonus token included."""
        gained, survival, conditional = [1.0], 1.0, HOPE
        for level in range(depth):
            hits, tries = (self.hits[level], self.tries[level]) if level < len(self.tries) else (0.0, 0.0)
            conditional = (hits + WEIGHT * conditional) / (tries + WEIGHT)
            survival *= conditional
            gained.append(gained[-1] + survival)
        return gained


@dataclass(frozen=True)
class Offer:
    """What an arm promises: tokens a second at its best depth; `needed` of its tokens must stand for it to pay."""

    rate: float
    depth: int
    needed: float


def needed(seconds: Mapping[int, float], depths: Sequence[int]) -> float:
    """The acceptance of every level from which drafting so deep pays; 1 where even all tokens accepted would not do."""

    def pays(acceptance: float) -> bool:
        return any(sum(acceptance**level for level in range(d + 1)) / seconds[d] > worth for d in depths)

    worth, low, high = MARGIN / seconds[0], 0.0, 1.0
    for _ in range(BISECTIONS if pays(high) else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


@dataclass
class Arm:
    """A source of drafted tokens: what it lately brought, and how long it has been left aside."""

    survival: Survival = field(default_factory=Survival)
    patience: int = PATIENCE
    aside: float = 0.0
    streak: int = 0
    trying: int = 0
    """Rounds that are left of a try."""
    trier: object = None
    """The text that makes it."""
    debt: float = 0.0
    """Plain steps that its rounds lost and that are not paid off yet."""
    credit: float = 0.0
    """Plain steps that it may lose: one for every drafted token that was accepted, MOST_CREDIT at most."""
    needed: float = 0.0
    """The latest offer's."""
    _latest: tuple[Mapping[int, float], Sequence[int], int, Offer] | None = None

    def best(self, seconds: Mapping[int, float], depths: Sequence[int]) -> Offer:
        """At the best of `depths`, the shallower of equals; at first only the shallowest. Reckoned anew only where
        something was learnt, or costs are others."""
        latest = self._latest
        if latest is None or latest[0] is not seconds or latest[1:3] != (depths, self.survival.version):
            tried = depths if self.survival.tries else depths[:1]
            gained = self.survival.gained(max(tried))
            rate, depth = max(((gained[d] / seconds[d], d) for d in tried), key=lambda offer: (offer[0], -offer[1]))
            latest = (seconds, depths, self.survival.version, Offer(rate, depth, needed(seconds, depths)))
            self._latest = latest
        self.needed = latest[3].needed
        return latest[3]

    def due(self, text: object) -> bool:
        """Whether `text` is to run it though it is not the best."""
        return self._ready or (self.trying > 0 and self.trier is text)

    def awaited(self, text: object) -> bool:
        """Whether another text is trying it: what is known of it was let fade, and all would hope at once."""
        return self.trying > 0 and self.trier is not text

    @property
    def _ready(self) -> bool:
        return self.debt <= 0 and self.needed < 1.0 and self.aside * (1.0 - self.needed) >= self.patience

    def charge(self, loss: float, accepted: int) -> float:
        """A round of it lost so many plain steps, or gained where that is negative. What its credit did not cover."""
        self.debt = max(0.0, self.debt + loss)
        uncovered = max(0.0, loss - self.credit)
        self.credit = min(MOST_CREDIT, max(0.0, self.credit - max(0.0, loss)) + accepted)
        return uncovered

    def turn(self, text: object, share: float = 1.0, *, run: bool, best: bool) -> None:
        """A round of `text` goes by in which this arm has something to offer, `share` of a round of all texts. A try
        that begins costs patience, success returns it."""
        if run and self._ready:
            self.survival.fade()
            self.trying, self.patience, self.trier = TRY, min(MOST_PATIENCE, 2 * self.patience), text
        self.trying = max(0, self.trying - run)
        self.debt = max(0.0, self.debt - PART * share)
        self.aside = 0.0 if run else self.aside + share
        self.streak = self.streak + 1 if run and best else 0
        if self.streak >= PATIENCE:
            self.patience = PATIENCE


class AdaptiveProposer:
    """Runs the best of its sources at its best depth, plain decoding (an empty tree) included.

    `fixed`: the draft's depth is not a choice, only whether it or an n-gram match drafts.
    """

    def __init__(
        self, draft: Proposer | None, ngram: NgramProposer | None, costs: RoundCosts, fixed: bool = False
    ) -> None:
        self.draft, self.ngram, self.costs, self.fixed = draft, ngram, costs, fixed
        self.sources: list[Proposer] = [source for source in (draft, ngram) if source is not None]
        self.arms: dict[str, Arm] = {}
        self._text, self._share = object(), 1.0
        self._running: tuple[Arm, int, float, float] | None = None
        self.behind = self._rounds = 0
        """`behind`: rows that the draft would have to catch up on."""
        self._lost = 0.0
        """Plain steps that this text lost beyond its arms' credit."""

    def fork(self) -> "AdaptiveProposer":
        """What is learnt by one is known to all."""
        draft = None if self.draft is None else self.draft.fork()
        ngram = None if self.ngram is None else self.ngram.fork()
        forked = AdaptiveProposer(draft, ngram, self.costs, self.fixed)
        forked.arms = self.arms
        return forked

    def price(self, costs: RoundCosts, texts: int) -> None:
        """What a round costs from now on, in which so many texts go on: one beside others costs differently."""
        self.costs, self._share = costs, 1 / texts

    def forget(self) -> None:
        """Whatever was learnt, by all of them."""
        self.arms.clear()

    def reserve(self, rows: int) -> None:
        for source in self.sources:
            source.reserve(rows)

    def begin(self) -> None:
        """A new text. What was learnt of the sources stays."""
        self._running, self.behind, self._rounds, self._lost = None, 0, 0, 0.0
        for source in self.sources:
            source.begin()

    def observe(self, taps_BRA: Tensor | None, ids: Sequence[int], start: int) -> None:
        if self._running is not None:
            arm, drafted, cost, behind = self._running
            arm.survival.learn(drafted, len(ids) - 1)
            self._lost += arm.charge(self._share * (cost - len(ids)) + behind, len(ids) - 1)
            self._running = None
        self.behind += len(ids)
        for source in self.sources:
            source.observe(taps_BRA, ids, start)

    def propose(self, num_steps: int) -> Tree:
        choice = self.choose(num_steps)
        if isinstance(choice, Tree):
            return choice
        assert self.draft is not None, "only a draft is asked to draft"
        return self.drafted(self.draft.propose(choice))

    def choose(self, num_steps: int) -> Tree | int:
        """What the next round verifies, or how many levels the draft is to draft for it: then `drafted` follows."""
        self._rounds += 1
        found = self.ngram.propose(num_steps) if self.ngram else PLAIN
        offers = self._offers(num_steps, found)
        name = self._choose(offers)
        if name is None:
            return PLAIN
        depth = offers[name].depth
        if name == "draft":
            return depth
        tree = Tree(found.tokens[:depth], found.parents[:depth])
        self._running = (self.arms[name], tree.depth, self.costs.ngram[tree.depth], 0.0)
        return tree

    def drafted(self, tree: Tree) -> Tree:
        """`tree` is what the draft drafted as it was chosen to."""
        cost, behind = self.costs.draft[tree.depth], self._catching_up
        self.behind = 0
        self._running = (self.arms["draft"], tree.depth, cost, behind) if tree.tokens else None
        return tree

    def _offers(self, num_steps: int, found: Tree) -> dict[str, Offer]:
        """Of every arm that has something to draft now."""
        offers = {}
        if self.draft is not None:
            depths = range(num_steps if self.fixed else 1, num_steps + 1)
            offers["draft"] = self._offer("draft", depths, self.costs.draft, self._catching_up)
        if found.tokens and self.ngram is not None:
            name = f"ngram {min(self.ngram.match, LONGEST_CLASS)}"
            offers[name] = self._offer(name, range(1, found.depth + 1), self.costs.ngram)
        return offers

    def _offer(self, name: str, depths: Sequence[int], costs: Mapping[int, float], behind: float = 0.0) -> Offer:
        """The best among the depths whose round this text can pay even if it gains nothing; a rate of 0 where it can
        pay none."""
        arm = self._arm(name)
        most = arm.credit + FIRST + SHARE * self._rounds - self._lost - behind
        if not self.fixed and any(self._share * (costs[depth] - 1) > most for depth in depths):
            depths = [depth for depth in depths if self._share * (costs[depth] - 1) <= most]
        return arm.best(costs, depths) if depths else Offer(0.0, 0, 1.0)

    @property
    def _catching_up(self) -> float:
        """Plain steps that the draft takes for the rows it was told and has not computed."""
        return max(0, self.behind - USUAL_ROWS) * self.costs.row

    def _choose(self, offers: Mapping[str, Offer]) -> str | None:
        """The arm to run, None for a plain step: the best, or one whose time for another try has come."""
        rests = not (self.fixed and self.draft)
        best, rate = None, MARGIN / self.costs.ngram[0] if rests else 0.0
        for name, offer in offers.items():
            if offer.rate > rate and not self.arms[name].awaited(self._text):
                best, rate = name, offer.rate
        due = next((n for n in offers if n != best and offers[n].rate and self.arms[n].due(self._text)), None)
        for name in offers:
            self.arms[name].turn(self._text, self._share, run=name == (due or best), best=name == best)
        return due or best

    def _arm(self, name: str) -> Arm:
        return self.arms.setdefault(name, Arm())
