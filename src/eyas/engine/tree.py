"""What was drafted in a round: a tree of tokens below the last verified one. A chain is a tree without branches.

Source of the growth: EAGLE-2 (arXiv 2406.16858) as SGLang 0.5.23 does it (speculative/eagle_utils.py,
organize_draft_results): every level expands the topk nodes of highest path probability, and of all candidates the best
are verified.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Tree:
    """Row 0 of a verify forward is the last verified token, the root; row i holds tokens[i - 1] below row
    parents[i - 1], which is less than i."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), "every token has a parent"
        assert all(0 <= parent <= index for index, parent in enumerate(self.parents)), "parents come first"

    @property
    def is_chain(self) -> bool:
        return all(parent == index for index, parent in enumerate(self.parents))

    @property
    def row_parents(self) -> tuple[int, ...] | None:
        """As the target's forward wants them: the root's is -1; None for a chain."""
        return None if self.is_chain else (-1, *self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of every row, the root's 0 first."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

    def child(self, row: int, token: int) -> int | None:
        """The row that holds `token` below `row`."""
        return self._children.get((row, token))

    def path(self, row: int) -> list[int]:
        """Rows from the root to `row`, both included."""
        rows = [row]
        while rows[-1]:
            rows.append(self.parents[rows[-1] - 1])
        return rows[::-1]

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        children: dict[tuple[int, int], int] = {}
        for index, place in enumerate(zip(self.parents, self.tokens, strict=True)):
            children.setdefault(place, index + 1)
        return children


def chain(tokens: Sequence[int]) -> Tree:
    return Tree(tuple(tokens), tuple(range(len(tokens))))


@dataclass(frozen=True, eq=False)
class Node:
    """A candidate: its token, the probability of its whole path, its level (1 below the root), its parent if that is
    not the root."""

    token: int
    probability: float
    level: int
    parent: "Node | None" = None


Expand = Callable[[Sequence[Node]], Sequence[Sequence[tuple[int, float]]]]
"""Nodes of one level to, for each, the topk (token, probability) that may follow it. No nodes stands for the root."""


def grow(expand: Expand, topk: int, num_steps: int, nodes: int, stop_below: float = 0.0) -> Tree:
    """The `nodes` best candidates of `num_steps` levels; of equals the shallower, then the earlier.

    No path is more probable than its beginning, so the best nodes always hold their parents. Candidates less probable
    than `stop_below` are dropped, and where a level has none left the growth ends.
    """
    candidates: list[Node] = []
    frontier: list[Node] = []
    for level in range(1, num_steps + 1):
        parents: list[Node | None] = [*frontier] if frontier else [None]
        found = [
            Node(token, min(1.0, probability) * (parent.probability if parent else 1.0), level, parent)
            for parent, children in zip(parents, expand(frontier), strict=True)
            for token, probability in children
        ]
        found = [node for node in best_first(found) if node.probability >= stop_below]
        if not found:
            break
        candidates += found
        frontier = found[:topk]
    return tree_of(best_first(candidates)[:nodes])


def best_first(nodes: Sequence[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (-node.probability, node.level))


def tree_of(nodes: Sequence[Node]) -> Tree:
    """The tree of `nodes`, level by level, so that every one comes after its parent."""
    ordered = sorted(nodes, key=lambda node: node.level)
    rows = {node: row for row, node in enumerate(ordered, start=1)}
    parents = tuple(rows[node.parent] if node.parent else 0 for node in ordered)
    return Tree(tuple(node.token for node in ordered), parents)
