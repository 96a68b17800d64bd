"""The target's forward over a few rows at known positions, through transformers' own modules, with its taps.

Shapes: B texts (1, or several side by side), R rows, H hidden, A width of the concatenated taps, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eyas.engine.cache import ATTENTION, RUNNING, KVCache, Running, SideBySide, branching, depths, register
from eyas.engine.experts import use_experts_by_row
from eyas.engine.rows import Lanes, TextRows
from eyas.errors import InputError
from eyas.formats.taps import check_boundaries
from eyas.models.target import Target

PREFILL_ROWS = 512
"""Prompt rows in one forward: keeps a long prompt's memory flat."""


class Forward(Protocol):
    """What an engine asks of a target: this file's plain path, or native_forward.py's compiled one."""

    target: Target
    boundaries: tuple[int, ...]
    rows: int | None
    cache: KVCache
    together: int | None
    """How many texts go through one forward, each with the bits of its lone run; None: any number."""
    rolls_back: bool
    """Whether rows can be overwritten: without that nothing can be drafted."""
    reason: str
    """Why no faster way runs the target; empty where nothing forbids."""
    grain: int
    """A prompt in parts has the bits of the whole where they begin at multiples of this."""

    def close(self) -> None: ...

    def prefill(self, ids: Sequence[int], start: int = 0) -> tuple[Tensor, Tensor | None]: ...

    def verify(self, ids: Sequence[int], start: int, parents: Sequence[int] | None = None) -> Tensor: ...

    def verify_texts(self, texts: Sequence[TextRows]) -> Lanes: ...

    def keep(self, path: Sequence[int]) -> None: ...

    def logits(self, normed_BRH: Tensor) -> Tensor: ...

    def state(self, boundary: int) -> Tensor: ...

    def taps(self, path: Sequence[int] | None = None) -> Tensor: ...


class ModuleForward:
    """What forwards through transformers' own modules share: boundary states by hooks, rows at known positions.

    `rows` is the row bucket: how many rows `verify` computes whatever number it is given. None pads nothing: the
    unpadded baseline, whose rows may differ in their last bits.
    """

    name: str
    """Of the path, for the start-up line."""
    rolls_back, grain, reason = True, PREFILL_ROWS, ""

    def __init__(self, target: Target, boundaries: Sequence[int] = (), rows: int | None = None) -> None:
        if boundaries:
            check_boundaries(boundaries, target.num_hidden_layers, where="the draft's taps")
        self.target, self.rows = target, rows
        self.together: int | None = 1
        self.boundaries = tuple(boundaries)
        self.cache = KVCache(target.dtype, target.model.device)
        self.positions: list[int] = []
        self._states: dict[int, Tensor] = {}
        self._takes = inspect.signature(target.backbone.forward).parameters
        self._hooks = [self._hook(boundary) for boundary in self.boundaries]

    @staticmethod
    def unfit(target: Target) -> str | None:
        """Why this way cannot run `target`, as far as its class and config tell."""
        raise NotImplementedError

    def close(self) -> None:
        """Take the hooks off the target."""
        for hook in self._hooks:
            hook.remove()

    def prefill(self, ids: Sequence[int], start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Fill the cache with a prompt. Final-normed state of the last row [1, 1, H], taps of all rows [1, T, A].

        `start`, a multiple of `grain`: how many of its rows are there already, in chunks as here; none of them are
        in the taps. A prompt in parts has the bits of the whole.
        """
        assert start % self.grain == 0, "a prompt is taken in whole chunks"
        taps = []
        last = None
        for first in range(start, len(ids), self.grain):
            last = self._prompt(ids[first : first + self.grain], first)
            if self.boundaries:
                taps.append(self.taps())
        assert last is not None, "a prompt has at least one token"
        return last[:, -1:], torch.cat(taps, dim=1) if taps else None

    def verify(self, ids: Sequence[int], start: int, parents: Sequence[int] | None = None) -> Tensor:
        """Final-normed states [1, rows or R, H] of `ids`; rows beyond len(ids) are padding.

        `parents` None: a chain at positions start, start + 1, ... Else a tree: parents[0] == -1 (the last verified
        token), parents[i] < i; row i has position start + depth and sees the cache below `start`, the rows it follows
        and itself. It has the bits of the same row of a chain, and stands in the cache only once `keep` has been told.
        """
        raise NotImplementedError

    def verify_texts(self, texts: Sequence[TextRows]) -> Lanes:
        """One after the other: a row's bits depend here on how many rows are multiplied beside it."""
        for text in texts:
            self.cache = text.cache
            yield self.logits(self.verify(text.ids, text.start, text.parents)), self

    def keep(self, path: Sequence[int]) -> None:
        """Rows `path` of the latest verify, ascending from 0, stand: they become cache rows start, start + 1, ..."""
        raise NotImplementedError

    def logits(self, normed_BRH: Tensor) -> Tensor:
        """float32 logits [R, V]."""
        return self.target.logits(normed_BRH)[0].float()

    def state(self, boundary: int) -> Tensor:
        """One tapped boundary [1, R, H] of the latest forward."""
        return self._states[boundary]

    def taps(self, path: Sequence[int] | None = None) -> Tensor:
        """Concatenated taps [1, R, A] of the latest forward, ascending boundaries; [1, P, A] of its rows `path`."""
        states = [self._states[boundary] for boundary in self.boundaries]
        if path is not None:
            rows = torch.tensor(list(path), device=self.cache.device)
            states = [state[:, rows] for state in states]
        return torch.cat(states, dim=-1)

    def _prompt(self, ids: Sequence[int], start: int) -> Tensor:
        """Final-normed states of a chunk of a prompt."""
        raise NotImplementedError

    def _run(self, ids: Sequence[int], positions: Sequence[int], **given: Any) -> Any:
        """The backbone's output over one text's rows."""
        return self._run_texts([ids], [positions], self.cache, **given)

    def _run_texts(
        self,
        ids: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        running: Running,
        /,
        **given: Any,
    ) -> Any:
        """Rows that are padding or drafted may lie beyond the target's last position, which has no embedding of its own
        where positions are learned: they stand at the last, for no text ever holds them."""
        device, last = self.cache.device, self.target.context_length - 1
        placed = [[min(position, last) for position in row] for row in positions]
        self.positions = placed[0]
        ids_BR = torch.tensor([list(row) for row in ids], device=device)
        return self._call(ids_BR, torch.tensor(placed, device=device), running, **given)

    def _call(self, ids_BR: Tensor, positions_BR: Tensor, running: Running, /, **given: Any) -> Any:
        if "position_ids" in self._takes:
            given["position_ids"] = positions_BR
        token = RUNNING.set(running)
        try:
            return self.target.backbone(input_ids=ids_BR, **given)
        finally:
            RUNNING.reset(token)

    def _hook(self, boundary: int) -> Any:
        layers, n = self.target.layers, self.target.num_hidden_layers
        if boundary == n:
            return layers[n - 1].register_forward_hook(self._record_last)

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[boundary] = args[0] if args else kwargs["hidden_states"]

        return layers[boundary].register_forward_pre_hook(record, with_kwargs=True)

    def _record_last(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._states[self.target.num_hidden_layers] = output if isinstance(output, Tensor) else output[0]


class TargetForward(ModuleForward):
    """Attention through transformers' interface, over the KVCache: trees in one forward, and several texts in one where
    engine/together.py found that they keep their bits."""

    name = "plain"

    def __init__(self, target: Target, boundaries: Sequence[int] = (), rows: int | None = None) -> None:
        super().__init__(target, boundaries, rows)
        register()
        self._own_attention = target.model.config._attn_implementation or "sdpa"
        target.model.set_attn_implementation(ATTENTION)
        self._own_experts = use_experts_by_row(target.model)
        # transformers takes a four-dimensional mask as prepared and builds none; the cache makes its own.
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=target.model.device)

    @staticmethod
    def unfit(target: Target) -> str | None:
        if reason := keeps_state(target):
            return reason
        if "chunked_attention" in (getattr(target.config, "layer_types", None) or ()):
            return "it attends in chunks"
        return None if target.model._can_set_attn_implementation() else "it attends by code of its own"

    def close(self) -> None:
        """Take the hooks off the target and give it its own attention and experts back."""
        super().close()
        self.target.model.set_attn_implementation(self._own_attention)
        if self._own_experts is not None:
            self.target.model.set_experts_implementation(self._own_experts)

    def prefill(self, ids: Sequence[int], start: int = 0) -> tuple[Tensor, Tensor | None]:
        """ModuleForward.prefill. Raises InputError where a layer's attention did not come through the cache."""
        found = super().prefill(ids, start)
        if len(self.cache.keys) != self.target.num_hidden_layers:
            raise no_attention(self.target, len(self.cache.keys))
        return found

    def verify(self, ids: Sequence[int], start: int, parents: Sequence[int] | None = None) -> Tensor:
        padded, positions = self._plan(TextRows(self.cache, ids, start, parents))
        return self._states_of([padded], [positions], self.cache)

    def verify_texts(self, texts: Sequence[TextRows]) -> Lanes:
        """As many in one forward as keep their bits there, each in a bucket of its own."""
        size = self.together or len(texts)
        for first in range(0, len(texts), size):
            yield from self._lanes(texts[first : first + size])

    def _lanes(self, texts: Sequence[TextRows]) -> Lanes:
        if len(texts) == 1:
            yield from super().verify_texts(texts)
            return
        ids, positions = zip(*(self._plan(text) for text in texts), strict=True)
        normed_BRH = self._states_of(ids, positions, SideBySide([text.cache for text in texts]))
        logits_BRV = self.target.logits(normed_BRH).float()
        taps_BRA = self.taps() if self.boundaries else normed_BRH[..., :0]
        for index, text in enumerate(texts):
            yield logits_BRV[index], _Lane(text.cache, taps_BRA[index : index + 1])

    def _plan(self, text: TextRows) -> tuple[Sequence[int], Sequence[int]]:
        """Ids and positions of a text's rows in their bucket; its cache is told of the forward."""
        tree = branching(text.parents)
        padded, positions = self._bucket(text.ids, text.start, tree)
        if tree is None:
            text.cache.begin(text.start, len(padded))
        else:
            text.cache.begin_paths(text.start, tree, len(padded))
        return padded, positions

    def _bucket(self, ids: Sequence[int], start: int, tree: Sequence[int] | None) -> tuple[list[int], list[int]]:
        """Ids and positions of the rows of a chain, or of a `tree`, padded."""
        count = max(len(ids), self.rows or 0)
        padded = [*ids, *[ids[-1]] * (count - len(ids))]
        if tree is None:
            return padded, list(range(start, start + count))
        assert len(tree) == len(ids) and tree[0] == -1 and -1 not in tree[1:], "one root, a parent for each id"
        return padded, [*(start + depth for depth in depths(tree)), *[start] * (count - len(ids))]

    def keep(self, path: Sequence[int]) -> None:
        self.cache.keep(path)

    def _prompt(self, ids: Sequence[int], start: int) -> Tensor:
        self.cache.begin(start, len(ids), by_position=False)
        return self._states_of([ids], [range(start, start + len(ids))], self.cache)

    def _states_of(self, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], running: Running) -> Tensor:
        mask = self._no_mask.expand(len(ids), -1, -1, -1)
        return self._run_texts(ids, positions, running, attention_mask=mask, use_cache=False).last_hidden_state


@dataclass(frozen=True)
class _Lane:
    """One text's rows of a forward of several; `taps_1RA` without columns where none are wanted."""

    cache: KVCache
    taps_1RA: Tensor

    def keep(self, path: Sequence[int]) -> None:
        self.cache.keep(path)

    def taps(self, path: Sequence[int] | None = None) -> Tensor:
        return self.taps_1RA if path is None else self.taps_1RA[:, list(path)]


STATE = "its layers keep a past of their own, which a rejected token would change for good"


def keeps_state(target: Target) -> str | None:
    """Why the target's past cannot be rolled back, as far as its class and config tell."""
    if target.model._is_stateful or getattr(target.config, "num_attention_heads", None) is None:
        return STATE
    return None


def check_rolls_back(forward: Forward) -> None:
    """Raises InputError for a target that nothing can be drafted for."""
    if not forward.rolls_back:
        raise InputError(
            wanted="a target whose past can be rolled back, to draft for it",
            got=f"{type(forward.target.model).__name__}: {forward.reason}",
            where="the embedded engine",
            next="decode it plainly: no draft, no ngram; or serve it with --engine sglang or vllm",
        )


def no_attention(target: Target, found: int) -> InputError:
    """The refusal of a target whose layers do not all attend."""
    return InputError(
        wanted=f"{target.num_hidden_layers} layers of scaled dot-product attention",
        got=f"{found} in {type(target.model).__name__}; the others keep a state of their own, which a rejected token "
        "would have changed for good, or attend by code of their own",
        where="the embedded engine",
        next="serve this target with --engine sglang or vllm",
    )
