"""Tokens drafted by the draft, as a chain or a tree, and the draft's cache.

Draft row p holds the taps of token p and the id of token p + 1, at rotary position p, and predicts token p + 2
(as both SGLang and vLLM pair them). Rows beyond the target's verified tokens are fed the draft's own state; once
verified they are rewritten from the target's taps: self-fed rows left in the cache are lossless and silently cost
acceptance.

Shapes: B batch (1), R rows, F rows of a tree's level, A width of the taps, H hidden, D draft vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from eyas.engine.draft_forward import DraftForward, PlainDraft
from eyas.engine.tree import Node, Tree, chain, grow
from eyas.errors import InputError
from eyas.models.draft import Draft
from eyas.models.target import Target
from eyas.settings import DraftingSettings

MOST_STEPS = 64
"""Levels that the cache has room for beyond the text where the settings name none."""


class Proposer(Protocol):
    """What the engine asks of anything that drafts for it, one text at a time."""

    def fork(self) -> "Proposer":
        """A proposer for a text beside this one's: the same weights and experience, rows of its own."""
        ...

    def reserve(self, rows: int) -> None:
        """Make room for a text of `rows` tokens."""

    def begin(self) -> None:
        """A new text; the next `observe` tells its prompt."""

    def observe(self, taps_BRA: Tensor | None, ids: Sequence[int], start: int) -> None:
        """Rows start... are verified: the target's taps of those tokens, and the ids that follow each.

        After a proposal len(ids) - 1 of its tokens were accepted.
        """

    def propose(self, num_steps: int) -> Tree:
        """At most `num_steps` levels of tokens after the last observed id."""
        ...


class DraftProposer:
    """Drafts with an EAGLE-3 draft: the argmax of every step, or a tree of the likeliest paths.

    Verified rows are written when a proposal needs them: a draft that rests computes nothing.
    """

    def __init__(self, draft: Draft | DraftForward, drafting: DraftingSettings | None = None) -> None:
        self.forward: DraftForward = PlainDraft(draft) if isinstance(draft, Draft) else draft
        self.draft, self.cache = self.forward.draft, self.forward.cache
        self.drafting = drafting or DraftingSettings()
        self._told: list[tuple[Tensor, Sequence[int]]] = []
        self._last_B1H: Tensor | None = None
        self.next_row = 0
        """Where the next told row belongs."""
        self._parents: list[int] = []
        self._level: dict[Node, int] = {}
        self._hidden_BFH: Tensor | None = None

    @property
    def positions(self) -> list[int]:
        """Rotary positions of the latest forward's rows."""
        return self.forward.positions

    def settle(self, most: int, kernels: str = "auto") -> list[nn.Linear]:
        """Choose kernels for 1..`most` rows of the draft, and return the linears that were exchanged."""
        return self.forward.settle(most, kernels)

    def fork(self) -> "DraftProposer":
        return type(self)(self.forward.fork(), self.drafting)

    def reserve(self, rows: int) -> None:
        self.cache.reserve(rows + self.drafting.topk * (self.drafting.num_steps or MOST_STEPS))

    def begin(self) -> None:
        self._told, self._last_B1H, self.next_row = [], None, 0

    def observe(self, taps_BRA: Tensor | None, ids: Sequence[int], start: int) -> None:
        """Rows start... are to be written from the target's taps of those tokens and the ids of the tokens that follow
        each, over what the draft fed itself."""
        assert taps_BRA is not None, "a draft reads taps"
        if not self._told:
            assert start <= self.next_row, "rows are told in order"
            self.next_row = start
        self._told.append((taps_BRA, ids))

    def propose(self, num_steps: int) -> Tree:
        """Chain or tree, as target ids. Rows it writes are the draft's own guesses."""
        self._begin(num_steps)
        if self.drafting.topk == 1 and not self.drafting.stop_below:
            return chain(self._chain(num_steps))
        nodes = self.drafting.rows(num_steps) - 1
        return grow(self._expand, self.drafting.topk, num_steps, nodes, self.drafting.stop_below)

    def _begin(self, num_steps: int) -> None:
        """The last told row's state is where the next chain or tree starts."""
        if self._told:
            self.write()

    @property
    def rows_told(self) -> int:
        """Rows that are verified and not written yet."""
        return sum(len(ids) for _, ids in self._told)

    def told(self) -> tuple[Tensor, list[int]]:
        """Their taps [1, R, A], and the ids that follow each."""
        ids = [token for _, tokens in self._told for token in tokens]
        return torch.cat([taps for taps, _ in self._told], dim=1), ids

    def write(self) -> None:
        """Write them."""
        taps_BRA, ids = self.told()
        self.wrote(self.forward.chain(self.forward.fuse(taps_BRA), ids, self.next_row), len(ids))

    def wrote(self, last_B1H: Tensor, rows: int) -> None:
        """They are written; h of the last of them is `last_B1H`."""
        self._last_B1H, self._told = last_B1H, []
        self.next_row += rows

    def _chain(self, num_steps: int) -> list[int]:
        hidden = self.last
        drafted: list[int] = []
        for step in range(num_steps):
            drafted.append(int(self.draft.target_ids(self.forward.logits(hidden)[0, -1].argmax())))
            if step + 1 < num_steps:
                hidden = self.forward.chain(self.forward.feedback(hidden), drafted[-1:], self.next_row + step)
        return drafted

    def _expand(self, frontier: Sequence[Node]) -> list[list[tuple[int, float]]]:
        """The likeliest tokens after each node of a level, all in one forward of the draft."""
        hidden_BFH = self._tree_rows(frontier) if frontier else self.last
        if not frontier:
            self._parents, self._level = [], {}
        self._hidden_BFH = hidden_BFH
        return self._likeliest(self.forward.logits(hidden_BFH)[0])

    def _likeliest(self, logits_FD: Tensor) -> list[list[tuple[int, float]]]:
        """The topk target ids of each row and their probabilities."""
        probabilities_FD = torch.softmax(logits_FD.float(), dim=-1)
        likeliest = probabilities_FD.topk(min(self.drafting.topk, probabilities_FD.shape[-1]))
        ids, values = self.draft.target_ids(likeliest.indices).tolist(), likeliest.values.tolist()
        return [list(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]

    def _tree_rows(self, frontier: Sequence[Node]) -> Tensor:
        """States [1, F, H] of a level's nodes, each fed the state of its parent, whose row it follows."""
        assert self._hidden_BFH is not None, "a level has one above it"
        above, first = self._level, len(self._parents) - len(self._level)
        places = [above[node.parent] if node.parent else 0 for node in frontier]
        self._parents += [first + place if node.parent else -1 for node, place in zip(frontier, places, strict=True)]
        self._level = {node: place for place, node in enumerate(frontier)}
        state_BFH = self.forward.feedback(self._hidden_BFH[:, places])
        return self.forward.tree(state_BFH, [node.token for node in frontier], self.next_row, self._parents)

    @property
    def last(self) -> Tensor:
        """h [1, 1, H] of the last verified row."""
        assert self._last_B1H is not None, "observe() a prompt before drafting"
        return self._last_B1H


def prepared(draft: Draft, target: Target, dtype: torch.dtype | None = None) -> Draft:
    """`draft` in `dtype` (None: the target's precision), on the target's device, with its embedding (in place).

    Raises InputError for a draft of another target's shape.
    """
    config = draft.config
    wanted = (target.num_hidden_layers, target.hidden_size, target.vocab_size)
    got = (config.target_num_hidden_layers, config.target_hidden_size, config.vocab_size)
    if wanted != got:
        raise InputError(
            wanted=f"a draft for a target of (layers, hidden, vocabulary) {wanted}",
            got=str(got),
            where="the draft's config",
            next="use the target the draft was trained for (eyas inspect DRAFT names it)",
            code="shape_mismatch" if wanted[:2] != got[:2] else "vocab_mismatch",
        )
    for parameter in draft.parameters():  # not .to(): it would round the rotary frequencies, which are a buffer
        if not parameter.is_meta:
            parameter.data = parameter.data.to(target.model.device, dtype or target.dtype)
    draft.share_embedding(target.embedding.to(dtype or target.dtype))
    return draft.eval().requires_grad_(False)
