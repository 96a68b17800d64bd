"""What a verify forward decides: which drafted tokens stand, what is emitted, and whether the text ends here."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from eyas.engine.sampling import Sampler, uniform
from eyas.engine.tree import Tree

Finish = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Walk:
    """The path that stands: its rows, the root's 0 first, and the token chosen after each of them."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def accepted(self) -> int:
        return len(self.rows) - 1


class Judge(Protocol):
    """How a round is decided: by the target, or for measurement by a curve."""

    valid: bool
    """Whether the text is the target's own."""

    def walk(self, tree: Tree, logits_RV: Tensor) -> Walk: ...

    def tell(self, tokens: Sequence[int]) -> None:
        """`tokens` are emitted."""


def walk(tree: Tree, choose: Callable[[int, Sequence[int]], int]) -> Walk:
    """Down the tree while the chosen token was drafted. `choose` is given a row and the drafted tokens up to it."""
    rows, tokens = [0], list[int]()
    while True:
        tokens.append(choose(rows[-1], tokens))
        row = tree.child(rows[-1], tokens[-1])
        if row is None:
            return Walk(tuple(rows), tuple(tokens))
        rows.append(row)


class TargetJudge:
    """A drafted token stands where it is the target's own choice: its argmax, or its draw at this place in the text."""

    valid = True

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def walk(self, tree: Tree, logits_RV: Tensor) -> Walk:
        if self.sampler.plain_argmax:
            chosen_R = logits_RV[: len(tree.tokens) + 1].argmax(dim=-1).tolist()
            return walk(tree, lambda row, drafted: chosen_R[row])
        return walk(tree, lambda row, drafted: self.sampler.choose(logits_RV[row], drafted))

    def tell(self, tokens: Sequence[int]) -> None:
        self.sampler.tell(tokens)


class CurveJudge:
    """Accepts drafted tokens by a survival curve: what a draft so good would bring. Its texts are nobody's.

    A round accepts i tokens or more with probability curve[i - 1], in a tree along the deepest of the likeliest paths.
    """

    valid = False

    def __init__(self, curve: Sequence[float], seed: int = 0) -> None:
        self.curve, self.seed, self.rounds = tuple(curve), seed, 0

    def walk(self, tree: Tree, logits_RV: Tensor) -> Walk:
        number = uniform(self.seed, self.rounds)
        self.rounds += 1
        wanted = sum(number < share for share in self.curve)
        rows = tree.path(tree.depths.index(tree.depth))[: wanted + 1]
        tokens = [tree.tokens[row - 1] for row in rows[1:]]
        return Walk(tuple(rows), (*tokens, int(logits_RV[rows[-1]].argmax())))

    def tell(self, tokens: Sequence[int]) -> None:
        pass


@dataclass(frozen=True)
class Verdict:
    """One round. `accepted` counts drafted tokens before any cut; `tokens` are what is emitted after it."""

    accepted: int
    tokens: tuple[int, ...]
    finish: Finish | None

    @property
    def kept(self) -> int:
        """Accepted drafted tokens that were emitted."""
        return min(self.accepted, len(self.tokens))


def cut(walk: Walk, stop_ids: Collection[int], room: int) -> Verdict:
    """What is emitted of a walk: up to the first stop token, which is emitted too, and at most `room` (1 or more)."""
    assert room >= 1, "a finished text has no rounds"
    tokens: tuple[int, ...] = walk.tokens
    finish: Finish | None = None
    stop = next((index for index, token in enumerate(tokens) if token in stop_ids), None)
    if stop is not None and stop < room:
        tokens, finish = tokens[: stop + 1], "stop"
    elif len(tokens) >= room:
        tokens, finish = tokens[:room], "length"
    return Verdict(walk.accepted, tokens, finish)
