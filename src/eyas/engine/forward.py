"""The target's forward over a few rows at known positions, through transformers' own modules, with its taps.

Shapes: B batch (1), R rows, H hidden, A width of the concatenated taps, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eyas.engine.cache import ATTENTION, RUNNING, KVCache, depths, register
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
    side_by_side: bool
    """Whether rows of several texts go through one forward, each with the bits of its lone run."""
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


class TargetForward:
    """Runs rows of one sequence; keeps the boundary states of the latest forward where taps are wanted.

    `rows` is the row bucket: how many rows `verify` computes whatever number it is given. None pads nothing: the
    unpadded baseline, whose rows may differ in their last bits.
    """

    side_by_side, grain = False, PREFILL_ROWS

    def __init__(self, target: Target, boundaries: Sequence[int] = (), rows: int | None = None) -> None:
        if boundaries:
            check_boundaries(boundaries, target.num_hidden_layers, where="the draft's taps")
        if getattr(target.config, "num_attention_heads", None) is None:
            raise no_attention(target, 0)
        register()
        self._own_attention = target.model.config._attn_implementation or "sdpa"
        target.model.set_attn_implementation(ATTENTION)
        self.target, self.rows = target, rows
        self.boundaries = tuple(boundaries)
        self.cache = KVCache(target.dtype, target.model.device)
        self._states: dict[int, Tensor] = {}
        # transformers takes a four-dimensional mask as prepared and builds none; the cache makes its own.
        self._no_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=target.model.device)
        self._hooks = [self._hook(boundary) for boundary in self.boundaries]

    def close(self) -> None:
        """Take the hooks off the target and give it its own attention back."""
        for hook in self._hooks:
            hook.remove()
        self.target.model.set_attn_implementation(self._own_attention)

    def prefill(self, ids: Sequence[int], start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Fill the cache with a prompt. Final-normed state of the last row [1, 1, H], taps of all rows [1, T, A].

        `start`, a multiple of PREFILL_ROWS: how many of its rows are there already, in chunks as here; none of them are
        in the taps. A prompt in parts has the bits of the whole.
        """
        assert start % PREFILL_ROWS == 0, "a prompt is taken in whole chunks"
        taps = []
        last = None
        for first in range(start, len(ids), PREFILL_ROWS):
            last = self._forward(ids[first : first + PREFILL_ROWS], first, by_position=False)
            if self.boundaries:
                taps.append(self.taps())
        assert last is not None, "a prompt has at least one token"
        self._check_layers()
        return last[:, -1:], torch.cat(taps, dim=1) if taps else None

    def verify(self, ids: Sequence[int], start: int, parents: Sequence[int] | None = None) -> Tensor:
        """Final-normed states [1, rows or R, H] of `ids`; rows beyond len(ids) are padding.

        `parents` None: a chain at positions start, start + 1, ... Else a tree: parents[0] == -1 (the last verified
        token), parents[i] < i; row i has position start + depth and sees the cache below `start`, the rows it follows
        and itself. It has the bits of the same row of a chain, and stands in the cache only once `keep` has been told.
        """
        count = max(len(ids), self.rows or 0)
        padded = [*ids, *[ids[-1]] * (count - len(ids))]
        if parents is None or list(parents) == list(range(-1, len(ids) - 1)):
            return self._forward(padded, start, by_position=True)
        assert len(parents) == len(ids) and parents[0] == -1 and -1 not in parents[1:], "one root, a parent for each id"
        self.cache.begin_paths(start, parents, count)
        positions = [start + depth for depth in depths(parents)]
        return self._run(padded, [*positions, *[start] * (count - len(ids))])

    def verify_texts(self, texts: Sequence[TextRows]) -> Lanes:
        """One after the other: a row's bits depend here on how many rows are multiplied beside it."""
        for text in texts:
            self.cache = text.cache
            yield self.logits(self.verify(text.ids, text.start, text.parents)), self

    def keep(self, path: Sequence[int]) -> None:
        """Rows `path` of the latest verify, ascending from 0, stand: they become cache rows start, start + 1, ..."""
        self.cache.keep(path)

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
            rows = torch.tensor(list(path), device=self._no_mask.device)
            states = [state[:, rows] for state in states]
        return torch.cat(states, dim=-1)

    def _forward(self, ids: Sequence[int], start: int, *, by_position: bool) -> Tensor:
        self.cache.begin(start, len(ids), by_position=by_position)
        return self._run(ids, range(start, start + len(ids)))

    def _run(self, ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Rows that are padding or drafted may lie beyond the target's last position, which has no embedding of its own
        where positions are learned: they stand at the last, for no text ever holds them."""
        device, last = self._no_mask.device, self.target.context_length - 1
        running = RUNNING.set(self.cache)
        try:
            output = self.target.backbone(
                input_ids=torch.tensor([list(ids)], device=device),
                position_ids=torch.tensor([[min(position, last) for position in positions]], device=device),
                attention_mask=self._no_mask,
                use_cache=False,
            )
        finally:
            RUNNING.reset(running)
        return output.last_hidden_state

    def _hook(self, boundary: int) -> Any:
        layers, n = self.target.layers, self.target.num_hidden_layers
        if boundary == n:
            return layers[n - 1].register_forward_hook(self._record_last)

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[boundary] = args[0] if args else kwargs["hidden_states"]

        return layers[boundary].register_forward_pre_hook(record, with_kwargs=True)

    def _record_last(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._states[self.target.num_hidden_layers] = output if isinstance(output, Tensor) else output[0]

    def _check_layers(self) -> None:
        """A layer whose attention did not come through the cache (linear attention, a fixed kernel) has no past."""
        if len(self.cache.keys) != self.target.num_hidden_layers:
            raise no_attention(self.target, len(self.cache.keys))


def no_attention(target: Target, found: int) -> InputError:
    """The refusal of a target whose layers do not all attend."""
    return InputError(
        wanted=f"{target.num_hidden_layers} layers of scaled dot-product attention",
        got=f"{found} in {type(target.model).__name__}; the others keep a state of their own, which a rejected token "
        "would have changed for good, or attend by code of their own",
        where="the embedded engine",
        next="serve this target with --engine sglang or vllm",
    )
