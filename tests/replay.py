"""A stub draft: replays a known continuation, wrong where it is told to be."""

from collections.abc import Callable, Sequence

from torch import Tensor

from eyas.engine.tree import Tree, chain


class ReplayProposer:
    """Drafts `text[i]` for output index i, or another token where `wrong(i)`.

    `text` is the target's own greedy output for a prompt of `prompt_tokens`. Rows are counted as the engine's
    proposer counts them: observing up to row r means the next drafted token is output index r + 2 - prompt_tokens.
    """

    def __init__(
        self,
        text: Sequence[int],
        prompt_tokens: int,
        vocab_size: int,
        wrong: Callable[[int], bool],
        checked: bool = True,
    ) -> None:
        """`checked`: what is told must be `text`; sampled texts may leave it."""
        self.text, self.prompt_tokens, self.vocab_size, self.wrong = text, prompt_tokens, vocab_size, wrong
        self.checked, self.next_index = checked, 0

    def reserve(self, rows: int) -> None:
        pass

    def begin(self) -> None:
        pass

    def observe(self, taps_BRA: Tensor | None, ids: Sequence[int], start: int) -> None:
        assert taps_BRA is not None
        assert taps_BRA.shape[1] == len(ids)
        self.next_index = start + len(ids) + 1 - self.prompt_tokens
        known = self.text[: self.next_index][-len(ids) :]
        assert not self.checked or list(ids)[-len(known) :] == list(known), "rows are told the tokens that follow them"

    def propose(self, num_steps: int) -> Tree:
        indices = range(self.next_index, self.next_index + num_steps)
        return chain([(self._at(i) + 1) % self.vocab_size if self.wrong(i) else self._at(i) for i in indices])

    def _at(self, index: int) -> int:
        return self.text[index] if index < len(self.text) else 0


class BranchingProposer(ReplayProposer):
    """Drafts a tree: at every level a wrong token and the right one, which is left out where `wrong(i)`; both go on."""

    def propose(self, num_steps: int) -> Tree:
        tokens: list[int] = []
        parents: list[int] = []
        path = 0
        for index in range(self.next_index, self.next_index + num_steps):
            right, below = self._at(index), path
            for offset in (1, 2) if self.wrong(index) else (1, 0):
                tokens.append((right + offset) % self.vocab_size)
                parents.append(below)
                path = len(tokens)
            tokens.append((right + 5) % self.vocab_size)
            parents.append(path)
        return Tree(tuple(tokens), tuple(parents))
