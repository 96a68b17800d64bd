"""Steps of a fixed shape, recorded once and replayed: CUDA graphs, where launching a small forward's kernels one by one
takes longer than they run.

A recorded step does the same work on the same addresses. So whatever changes from one replay to the next lies in
tensors that the step reads (`Step.inputs`), what it gives in tensors of its own (`Step.outputs`), and no number of it
is Python's but those of its shape, which is its key. The rest of the rules are CUDA's: nothing in it waits for the
device, and no shape depends on what a tensor holds. A step that breaks them, or that does not give the eager forward's
bits on other inputs than it was recorded with, is left aside aloud: the eager forward is oracle and way out.

Sources: torch 2.13 torch/cuda/graphs.py and its notes on CUDA semantics.

Shapes: R rows, D slots laid, P paths, L attended length, N query heads, K key/value heads, E width of a query and a
key, U width of a value.
"""

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.engine.cache import KVCache, additive_mask, attend_slice
from eyas.progress import say

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Given a step, runs it and returns what does the same again, on the same tensors. Raises RuntimeError where a step
cannot be recorded."""
OFF = "EYAS_GRAPHS"
"""Set to 0, this environment variable keeps CUDA on eager forwards."""
WARM_UPS = 3
"""Runs before a capture: libraries make handles and workspaces at a first call, which a capture forbids."""
ROOM = 4096


@dataclass(frozen=True)
class Recording:
    """How steps are recorded: `new_recorder` makes a recorder for steps that are dropped together (of one memory pool);
    `room` cache rows are reserved at start, for a cache that grows later has moved, and its steps are void."""

    new_recorder: Callable[[], Recorder]
    room: int = ROOM


def cuda_recorder() -> Recorder:
    """Steps become CUDA graphs that share a memory pool.

    That is allowed where graphs never run at once and none reads what another left in the pool: a step's inputs and
    outputs lie outside. Nothing draws from torch's generators, whose state a graph would have to be told.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(step: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # The outer block gives the stream back even where the capture fails, whose own exit then raises before it does.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            step()
        return graph.replay

    return record


def recording_for(device: torch.device, cache_rows: int | None = None) -> Recording | None:
    """How steps are recorded on `device`; None where they are run one kernel after the other."""
    if device.type != "cuda" or os.environ.get(OFF) == "0":
        return None
    return Recording(cuda_recorder, min(ROOM, cache_rows or ROOM))


@dataclass
class Step:
    """`run` computes `outputs` from `inputs`, both of which stay where they are."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    run: Callable[[], None]
    replay: Callable[[], None] | None = None

    def give(self, values: Sequence[Tensor]) -> None:
        for place, value in zip(self.inputs, values, strict=True):
            place.copy_(value)

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copies of what comes out: the next replay writes over it."""
        assert self.replay is not None, "a step is recorded before it is replayed"
        self.give(values)
        self.replay()
        return [output.clone() for output in self.outputs]


class StepGraphs:
    """The recorded steps over one cache. `on` False rests them; `why` says for good why none is replayed."""

    def __init__(self, cache: KVCache, recording: Recording, name: str) -> None:
        self.cache, self.name, self.on, self.why = cache, name, True, ""
        self.steps: dict[Hashable, Step] = {}
        self.recorded = 0
        """Steps recorded so far, those included that were dropped since."""
        self._new_recorder = recording.new_recorder
        self._recorder = self._new_recorder()
        self._moves = cache.moves

    def usable(self, cache: KVCache) -> bool:
        """Whether steps over `cache` can be replayed. Those recorded before it moved are dropped."""
        if self._moves != self.cache.moves:
            self.drop()
        return self.on and not self.why and cache is self.cache

    def drop(self) -> None:
        """Forget every step, and the memory that they share."""
        self.steps, self._recorder, self._moves = {}, self._new_recorder(), self.cache.moves

    def add(
        self,
        key: Hashable,
        step: Step,
        other: Sequence[Tensor],
        values: Sequence[Tensor],
        expected: Sequence[Tensor],
        read: Callable[[], Sequence[Tensor]] | None = None,
    ) -> bool:
        """Record `step` on `other` inputs, and keep it where on `values` it then gives what is `expected` of the first
        rows of each output (or of what `read` gives). False, aloud, where it does not: the rows that it wrote into the
        cache are then to be written again.
        """
        try:
            step.give(other)
            step.replay = self._recorder(step.run)
            self.recorded += 1
            outputs = step(values)
        except RuntimeError as error:
            return self.refuse(str(error).strip().splitlines()[0])
        found = outputs if read is None else read()
        pairs = zip(found, expected, strict=True)
        if not all(torch.equal(given[:, : wanted.shape[1]], wanted) for given, wanted in pairs):
            return self.refuse("replayed rows are not the eager forward's")
        self.steps[key] = step
        return True

    def refuse(self, why: str) -> bool:
        """Replay nothing any more, and say why."""
        self.drop()
        self.why = why
        say(f"engine: CUDA graphs of the {self.name} are not used: {why}")
        return False


@dataclass
class StaticRows:
    """What attends in a recorded forward: KVCache.attend with every number of it in a tensor but the attended length.

    Without `paths_PD` rows lie in `slots_D` as they come. With it each path is laid there in turn, and gives the rows
    `taken_PR` of it, as KVCache.begin_paths plans; `kept` then takes the rows themselves, by layer.
    """

    cache: KVCache
    length: int
    visible_RL: Tensor
    positions_R1: Tensor
    slots_D: Tensor
    paths_PD: Tensor | None = None
    taken_PR: Tensor | None = None
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query_BNRE: Tensor,
        key_BKRE: Tensor,
        value_BKRU: Tensor,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Context [B, N, R, U]."""
        states = key_BKRE.to(self.cache.dtype), value_BKRU.to(self.cache.dtype)
        buffers = self.cache.buffers(layer, key_BKRE.shape[1], key_BKRE.shape[3], value_BKRU.shape[3])
        keys, values = (buffer[:, :, : self.length] for buffer in buffers)
        mask = self._mask(query_BNRE.shape[1] // key_BKRE.shape[1], window)
        if self.paths_PD is None or self.taken_PR is None:
            lay(buffers, self.slots_D, states)
            return attend_slice(query_BNRE, keys, values, mask, scale, softcap, sinks_N)
        for place, rows in zip(self.kept[layer], states, strict=True):
            place.copy_(rows)
        merged = None
        for path_D, taken_R in zip(self.paths_PD, self.taken_PR, strict=True):
            lay(buffers, self.slots_D, [rows.index_select(2, path_D) for rows in states])
            context = attend_slice(query_BNRE, keys, values, mask, scale, softcap, sinks_N)
            merged = context if merged is None else torch.where(taken_R[:, None], context, merged)
        assert merged is not None, "a tree has a path"
        return merged

    def _mask(self, group: int, window: int | None) -> Tensor:
        if (group, window) not in self.masks:
            columns_1L = torch.arange(self.length, device=self.cache.device)[None]
            self.masks[group, window] = additive_mask(
                self.visible_RL, columns_1L, self.positions_R1, group, window, self.cache.dtype
            )
        return self.masks[group, window]


def lay(buffers: Sequence[Tensor], slots_D: Tensor, rows: Sequence[Tensor]) -> None:
    """Write rows [1, K, D, ...] into slots of keys and values."""
    for buffer, states in zip(buffers, rows, strict=True):
        buffer.index_copy_(2, slots_D, states)
