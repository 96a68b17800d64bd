"""The proposer of each method. P-EAGLE's drafts a whole chain, or all levels of a tree, in one forward of the draft.

Row p is EAGLE-3's (propose.py). The rows after the last verified one are fed placeholders for id and state, each at the
next position, and are overwritten by the next verified ones. Source: vLLM 0.33 spec_decode/llm_base_proposer.py,
set_inputs_first_pass. Its level i does not know which token was drafted at level i - 1, so in a tree every node of a
level has the same children.

Shapes: R rows, H hidden, S levels drafted, D draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eyas.engine.draft_forward import DraftForward
from eyas.engine.propose import DraftProposer
from eyas.engine.tree import Node
from eyas.formats.methods import MethodName
from eyas.models.draft import Draft, ParallelDraft
from eyas.settings import DraftingSettings

LONG = 16
"""Told rows beyond this many (a prompt's) are written on their own: of them only the last is drafted from."""


class ParallelProposer(DraftProposer):
    """Drafts with a P-EAGLE draft: the told rows and the placeholders are rows of one forward."""

    def __init__(self, draft: Draft | DraftForward, drafting: DraftingSettings | None = None) -> None:
        super().__init__(draft, drafting)
        assert isinstance(self.draft, ParallelDraft), "a draft with placeholders"
        self.mask_token_id = self.draft.mask_token_id
        self._mask_11H = self.forward.fuse(self.draft.mask_hidden)
        self._from: tuple[Tensor, list[int]] | None = None
        """State [1, 1, H] and id of the last verified row."""
        self._logits_SD = torch.empty(0, 0)

    def settle(self, most: int, kernels: str = "auto") -> list[nn.Linear]:
        """A forward holds a round's verified rows and the placeholders after them."""
        return super().settle(2 * most, kernels)

    def begin(self) -> None:
        super().begin()
        self._from = None

    def _begin(self, num_steps: int) -> None:
        """Write the told rows, and the logits of every level."""
        state_1RH, ids, start = self._unwritten()
        if len(ids) > LONG:
            self.forward.chain(state_1RH[:, :-1], ids[:-1], start)
            state_1RH, ids, start = state_1RH[:, -1:], ids[-1:], start + len(ids) - 1
        masks = num_steps - 1
        state = torch.cat([state_1RH, self._mask_11H.expand(1, masks, -1)], dim=1)
        hidden = self.forward.chain(state, [*ids, *[self.mask_token_id] * masks], start, last=num_steps)
        self._logits_SD = self.forward.logits(hidden)[0]

    def _unwritten(self) -> tuple[Tensor, list[int], int]:
        """States, ids and first position of the rows told since the last proposal; where there are none, of the last
        verified row, once more."""
        if self._told:
            state_1RH = self.forward.fuse(torch.cat([taps for taps, _ in self._told], dim=1))
            ids = [token for _, tokens in self._told for token in tokens]
            self._told, self._from = [], (state_1RH[:, -1:], ids[-1:])
            self.next_row += len(ids)
            return state_1RH, ids, self.next_row - len(ids)
        assert self._from is not None, "observe() a prompt before drafting"
        return *self._from, self.next_row - 1

    def _chain(self, num_steps: int) -> list[int]:
        return self.draft.target_ids(self._logits_SD.argmax(dim=-1)).tolist()

    def _expand(self, frontier: Sequence[Node]) -> list[list[tuple[int, float]]]:
        level = frontier[0].level if frontier else 0
        return self._likeliest(self._logits_SD[level : level + 1]) * max(1, len(frontier))


PROPOSERS: dict[MethodName, type[DraftProposer]] = {"eagle3": DraftProposer, "peagle": ParallelProposer}


def draft_proposer(runner: DraftForward, drafting: DraftingSettings | None = None) -> DraftProposer:
    """What drafts with this draft, by its method."""
    return PROPOSERS[runner.draft.config.method](runner, drafting)
