"""What the embedded engine computes at each stage of each round, written down.

Installed, it is hooks on the modules and two calls in the loop; not installed, the loop tests one attribute for None.

Shapes: B batch (1), R rows, H hidden, A width of the concatenated taps, D draft vocabulary.
"""

import json
import time
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas import __version__
from eyas.engine.forward import Forward, ModuleForward
from eyas.engine.propose import DraftProposer
from eyas.engine.tree import Tree
from eyas.engine.verify import Walk
from eyas.errors import InputError
from eyas.formats.trace import FIRST_VALUES, FORMAT, TENSORS, TRACE, Header, Stage, TraceRequest
from eyas.run import JSON, Manifest, disk_error, hash_file, write_manifest


def statistics(tensor: Tensor) -> JSON:
    """Shape, dtype, mean, deviation, norm and first values, as a record holds them."""
    values = tensor.detach().to("cpu", torch.float64).flatten()
    finite = bool(values.isfinite().all()) and values.numel() > 0
    numbers = (values.mean(), values.std(correction=0), values.norm()) if finite else (None, None, None)
    named = dict(zip(("mean", "deviation", "norm"), numbers, strict=True))
    first = values[:FIRST_VALUES]
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        **{name: None if value is None else float(value) for name, value in named.items()},
        "first": [float(value) if value.isfinite() else None for value in first],
    }


class TraceWriter:
    """Appends the lines of one trace folder. Raises InputError where the folder holds one, or on a full disk."""

    def __init__(self, request: TraceRequest, header: Header) -> None:
        self.folder, self.tensors = request.out, request.tensors
        self.started, self.lines = time.monotonic(), 0
        path = self.folder / TRACE
        if path.exists():
            raise InputError(
                wanted="a folder without a trace", got=f"one with {TRACE}", where=str(self.folder), next="another --out"
            )
        try:
            (self.folder / TENSORS if self.tensors else self.folder).mkdir(parents=True, exist_ok=True)
            self._file = path.open("x")
        except OSError as error:
            raise disk_error(path, error) from error
        self._line(header.model_dump(mode="json", exclude_none=True))

    def write(self, stage: Stage, tensor: Tensor | None = None, **facts: Any) -> None:
        """One record: `tensor`'s statistics, the tensor itself if asked for, and `facts`."""
        record: JSON = {"stage": stage, **{name: value for name, value in facts.items() if value is not None}}
        if tensor is not None:
            record |= statistics(tensor)
            if self.tensors:
                record["tensor"] = f"{TENSORS}/{self.lines:06d}-{stage}.safetensors"
                path = self.folder / record["tensor"]
                try:
                    save_file({"x": tensor.detach().cpu().contiguous()}, path)
                except OSError as error:
                    raise disk_error(path, error) from error
        self._line(record)

    def close(self, settings: JSON, facts: JSON) -> Manifest:
        """Declare the folder complete."""
        self._file.close()
        names = sorted(path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        files = {str(name): hash_file(self.folder / name) for name in names}
        seconds = time.monotonic() - self.started
        return write_manifest(
            self.folder, "trace", settings=settings, inputs={}, files=files, facts=facts, seconds=seconds
        )

    def _line(self, line: JSON) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise disk_error(self.folder / TRACE, error) from error
        self.lines += 1


class EngineTrace:
    """Hooks on an engine's target and draft. Records come in the order of the computation.

    Rows that only pad a verify forward are left out; drafted rows that were refused are in, for they were computed.
    """

    def __init__(self, request: TraceRequest, forward: Forward, chain: DraftProposer | None) -> None:
        assert isinstance(forward, ModuleForward), "a trace hooks on modules"
        target = forward.target
        header = Header(
            format=FORMAT,
            source="eyas",
            version=__version__,
            boundaries=forward.boundaries or None,
            target=target.identity.name,
        )
        self.request, self.forward, self.chain = request, forward, chain
        self.writer = TraceWriter(request, header)
        self.text = self.call = self.round = -1
        self.step = 0
        self._tokens: dict[int, int] = {}
        self._embedded: Tensor | None = None
        self._pending: tuple[list[int], list[int], list[tuple[int | None, Tensor]]] | None = None
        self._handles = [
            target.model.get_input_embeddings().register_forward_hook(self._embedding),
            target.backbone.register_forward_hook(self._forwarded, with_kwargs=True),
        ]
        if chain is not None:
            self._handles += [
                chain.draft.fc.register_forward_hook(self._fused),
                chain.draft.register_forward_hook(self._stepped),
                chain.draft.lm_head.register_forward_hook(self._scored),
            ]

    def begin(self) -> None:
        """A new text."""
        self._flush()
        self.text, self.round = self.text + 1, 0
        self._tokens = {}

    def observing(self, taps_BRA: Tensor, start: int) -> None:
        """The draft is about to be fed the taps of the tokens at start, start + 1, ..."""
        self._flush()
        if self.call >= self.request.calls:
            return
        positions = list(range(start, start + taps_BRA.shape[1]))
        self._write("taps", taps_BRA, ids=[self._tokens[position] for position in positions], positions=positions)

    def judged(self, tree: Tree, walk: Walk, position: int) -> None:
        """A round is decided: its forward had one row more than were drafted, the rest was padding."""
        self.round += 1
        self._flush(rows=1 + len(tree.tokens))
        # Rows of a tree share positions; what is told next are those of the path.
        self._tokens |= {position + step: tree.tokens[row - 1] for step, row in enumerate(walk.rows) if row}
        parents = None if tree.is_chain else list(tree.parents)
        self._write(
            "accepted", accepted=walk.accepted, drafted=list(tree.tokens), parents=parents, chosen=list(walk.tokens)
        )

    def close(self) -> Manifest:
        """Take the hooks off and complete the folder."""
        self._flush()
        self._detach()
        settings = {"tensors": self.request.tensors, "calls": self.request.calls}
        facts = {
            "target": self.forward.target.identity.model_dump(),
            "boundaries": list(self.forward.boundaries),
            "texts": self.text + 1,
            "calls": self.call + 1,
            "records": self.writer.lines - 1,
        }
        return self.writer.close(settings, facts)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _write(self, stage: Stage, tensor: Tensor | None = None, **facts: Any) -> None:
        if self.call < self.request.calls:
            self.writer.write(stage, tensor, call=self.call, text=self.text, round=self.round, **facts)

    def _embedding(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        self._embedded = output

    def _forwarded(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._flush()
        self.call, self.step = self.call + 1, 0
        if self.call >= self.request.calls:
            self._detach()
            return
        assert self._embedded is not None, "a forward embeds its ids"
        states = [(boundary, self.forward.state(boundary)) for boundary in self.forward.boundaries]
        ids, positions = kwargs["input_ids"][0].tolist(), self.forward.positions
        self._tokens |= dict(zip(positions, ids, strict=True))
        self._pending = (ids, positions, [(None, self._embedded), *states])

    def _flush(self, rows: int | None = None) -> None:
        """Write the latest forward of the target, cut to the rows that are no padding."""
        if self._pending is None:
            return
        ids, positions, states = self._pending
        self._pending = None
        for index, (boundary, state) in enumerate(states):
            stage: Stage = "embedding" if boundary is None else "tap"
            place = None if boundary is None else index - 1
            facts = {"ids": ids[:rows], "positions": positions[:rows], "boundary": boundary, "index": place}
            self._write(stage, state[:, :rows], **facts)

    def _fused(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        self._write("fc", output, step=0)

    def _stepped(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        assert self.chain is not None
        positions = self.chain.positions
        fed = self.chain.draft.feedback(output)
        self._write("layer", fed, step=self.step, ids=args[0][0].tolist(), positions=positions)
        self.step += 1

    def _scored(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        self._write("logits", output, step=self.step - 1)
