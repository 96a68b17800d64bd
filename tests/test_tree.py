"""Trees of drafted tokens, against brute force over every path of a tiny vocabulary."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.tree import Node, Tree, chain, grow

VOCAB = 5


def table(seed: int) -> dict[tuple[int, ...], list[float]]:
    """The next token's distribution after every path of up to 4 tokens."""
    generator = torch.Generator().manual_seed(seed)
    paths: list[tuple[int, ...]] = [()]
    for _ in range(4):
        paths += [(*path, token) for path in paths if len(path) == len(paths[-1]) for token in range(VOCAB)]
    return {path: torch.randn(VOCAB, generator=generator).mul(2).softmax(0).tolist() for path in paths}


def path_of(node: Node) -> tuple[int, ...]:
    return (*(path_of(node.parent) if node.parent else ()), node.token)


def expand_by(distributions: dict[tuple[int, ...], list[float]], topk: int):
    def expand(frontier: Sequence[Node]) -> list[list[tuple[int, float]]]:
        found = [distributions[path] for path in ([path_of(node) for node in frontier] or [()])]
        return [sorted(enumerate(row), key=lambda item: -item[1])[:topk] for row in found]

    return expand


def brute_force(
    distributions: dict[tuple[int, ...], list[float]], topk: int, num_steps: int, nodes: int
) -> set[tuple[int, ...]]:
    """SGLang's rule spelt out: beams of topk, all their children candidates, the best `nodes` of them."""
    probability: dict[tuple[int, ...], float] = {(): 1.0}
    beam: list[tuple[int, ...]] = [()]
    candidates: list[tuple[int, ...]] = []
    for _ in range(num_steps):
        level = []
        for path in beam:
            row = distributions[path]
            for token in sorted(range(VOCAB), key=lambda token: -row[token])[:topk]:
                level.append((*path, token))
                probability[level[-1]] = probability[path] * row[token]
        candidates += level
        beam = sorted(level, key=lambda path: -probability[path])[:topk]
    return set(sorted(candidates, key=lambda path: -probability[path])[:nodes])


def paths(tree: Tree) -> list[tuple[int, ...]]:
    rows = range(1, len(tree.tokens) + 1)
    return [tuple(tree.tokens[step - 1] for step in tree.path(row)[1:]) for row in rows]


@given(seed=st.integers(0, 50), topk=st.integers(1, VOCAB), num_steps=st.integers(1, 4), nodes=st.integers(1, 20))
def test_a_tree_holds_the_best_paths_by_probability_and_their_parents(
    seed: int, topk: int, num_steps: int, nodes: int
) -> None:
    distributions = table(seed)
    tree = grow(expand_by(distributions, topk), topk, num_steps, nodes)
    found = paths(tree)
    assert set(found) == brute_force(distributions, topk, num_steps, nodes)
    assert len(found) == len(set(found))
    assert all(path[:-1] in {(), *found} for path in found)


def test_as_many_branches_as_tokens_and_as_many_nodes_as_paths_is_the_whole_tree() -> None:
    tree = grow(expand_by(table(3), VOCAB), VOCAB, 2, 1000)
    assert len(tree.tokens) == VOCAB + VOCAB**2
    assert tree.depth == 2


@pytest.mark.parametrize("num_steps", [1, 3])
def test_one_branch_is_the_greedy_chain(num_steps: int) -> None:
    distributions, tokens = table(4), ()
    for _ in range(num_steps):
        row = distributions[tokens]
        tokens = (*tokens, row.index(max(row)))
    tree = grow(expand_by(distributions, 1), 1, num_steps, num_steps)
    assert tree == chain(tokens)
    assert tree.row_parents is None


def test_equally_probable_nodes_keep_their_parents() -> None:
    def certain(frontier: Sequence[Node]) -> list[list[tuple[int, float]]]:
        return [[(7, 1.0), (8, 0.0)] for _ in frontier or [None]]

    assert grow(certain, 2, 3, 3) == Tree((7, 7, 7), (0, 1, 2))


def test_a_draft_that_is_unsure_stops() -> None:
    calls = []

    def halves(frontier: Sequence[Node]) -> list[list[tuple[int, float]]]:
        calls.append(len(frontier))
        return [[(1, 0.6), (2, 0.4)] for _ in frontier or [None]]

    tree = grow(halves, 2, 5, 100, stop_below=0.3)
    assert tree == Tree((1, 2, 1), (0, 0, 1))  # 0.6, 0.4, 0.36; 0.24 and less are left out
    assert calls == [0, 2, 1]
    assert grow(halves, 2, 5, 100, stop_below=0.7) == Tree()


def test_rows_know_their_depths_parents_and_children() -> None:
    tree = Tree((5, 6, 7, 5), (0, 0, 2, 3))
    assert tree.depths == (0, 1, 1, 2, 3)
    assert tree.row_parents == (-1, 0, 0, 2, 3)
    assert (tree.child(0, 6), tree.child(2, 7), tree.child(0, 7)) == (2, 3, None)
    assert tree.path(4) == [0, 2, 3, 4]
    assert Tree().is_chain
    assert Tree().depth == 0
    with pytest.raises(AssertionError, match="parents come first"):
        Tree((1, 2), (0, 2))
