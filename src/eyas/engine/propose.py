"""A chain of drafted tokens, and the draft's cache.

Draft row p holds the taps of token p and the id of token p + 1, at rotary position p, and predicts token p + 2
(as both SGLang and vLLM pair them). Rows beyond the target's verified tokens are fed the draft's own state; once
verified they are rewritten from the target's taps: self-fed rows left in the cache are lossless and silently cost
acceptance.

Shapes: B batch (1), R rows, A width of the taps, H hidden, D draft vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from eyas.engine.cache import KVCache
from eyas.engine.linear import fastest_kernels, install
from eyas.errors import InputError
from eyas.models.draft import Draft
from eyas.models.target import Target


class Proposer(Protocol):
    """What the engine asks of anything that drafts for it."""

    cache: KVCache

    def observe(self, taps_BRA: Tensor, ids: Sequence[int], start: int) -> None:
        """Rows start... are verified: the target's taps of those tokens, and the ids that follow each."""

    def propose(self, num_steps: int) -> list[int]:
        """The next `num_steps` tokens after the last observed id."""
        ...


class ChainProposer:
    """Drafts greedily, one token a step, batch 1."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.cache = KVCache(draft.fc.weight.dtype, draft.fc.weight.device)
        self._last_B1H: Tensor | None = None
        self._next_row = 0

    def settle(self, most: int, kernels: str = "auto") -> list[nn.Linear]:
        """Choose kernels for 1..`most` rows of the draft's linears, and return these.

        Its rows need no fixed bits, so each row count takes its own fastest.
        """
        linears = [module for module in self.draft.modules() if isinstance(module, nn.Linear)]
        counts = range(1, most + 1)
        install(linears, fastest_kernels(linears, counts) if kernels == "auto" else dict.fromkeys(counts, kernels))
        return linears

    def observe(self, taps_BRA: Tensor, ids: Sequence[int], start: int) -> None:
        """Write rows start... from the target's taps of those tokens and the ids of the tokens that follow each.

        Overwrites self-fed rows; the last row's state is where the next chain starts.
        """
        hidden_BRH = self._rows(self.draft.fuse(taps_BRA), ids, start)
        self._last_B1H = hidden_BRH[:, -1:]
        self._next_row = start + len(ids)

    def propose(self, num_steps: int) -> list[int]:
        """The next `num_steps` drafted tokens, as target ids. Rows it writes are the draft's own guesses."""
        assert self._last_B1H is not None, "observe() a prompt before drafting"
        hidden, row = self._last_B1H, self._next_row
        drafted: list[int] = []
        for step in range(num_steps):
            drafted.append(self._choose(hidden))
            if step + 1 < num_steps:
                hidden = self._rows(self.draft.feedback(hidden), drafted[-1:], row)
                row += 1
        return drafted

    def _choose(self, hidden_B1H: Tensor) -> int:
        draft_id = self.draft.logits(hidden_B1H)[0, -1].argmax()
        return int(self.draft.target_ids(draft_id))

    def _rows(self, state_BRH: Tensor, ids: Sequence[int], start: int) -> Tensor:
        device = state_BRH.device
        self.cache.begin(start, len(ids), by_position=False)
        rope = self.draft.rope(torch.arange(start, start + len(ids), device=device)[None])
        return self.draft(torch.tensor([list(ids)], device=device), state_BRH, rope, self._attend)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.cache.attend(layer, query, key, value, window=self.draft.config.sliding_window)


def prepared(draft: Draft, target: Target) -> Draft:
    """`draft` in the target's precision, on its device, with its embedding (in place).

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
        )
    for parameter in draft.parameters():  # not .to(): it would round the rotary frequencies, which are a buffer
        if not parameter.is_meta:
            parameter.data = parameter.data.to(target.model.device, target.dtype)
    draft.share_embedding(target.embedding)
    return draft.eval().requires_grad_(False)
