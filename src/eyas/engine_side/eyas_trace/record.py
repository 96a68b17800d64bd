"""The recorder: lines of trace.jsonl, tensors if asked for, until the calls asked for are over.

Whatever goes wrong here is logged and ends the trace; it never reaches the engine.

Shapes: R rows, H hidden, A width of the concatenated taps.
"""

import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FORMAT = 1
TRACE, TENSORS = "trace.jsonl", "tensors"
FIRST_VALUES = 5
CALLS = 64
logger = logging.getLogger("eyas_trace")


def wanted() -> bool:
    """Whether EYAS_TRACE asks for a trace; if so, this package's own messages are heard from now on."""
    asked = os.environ.get("EYAS_TRACE", "0") not in ("", "0")
    if asked and not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return asked


def statistics(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape, dtype, mean, deviation, norm and first values; None where a value is not finite."""
    values = tensor.detach().to("cpu", torch.float64).flatten()
    finite = values.numel() > 0 and bool(values.isfinite().all())
    numbers = (values.mean(), values.std(correction=0), values.norm()) if finite else (None, None, None)
    named = zip(("mean", "deviation", "norm"), numbers, strict=True)
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        **{name: None if value is None else float(value) for name, value in named},
        "first": [float(value) if value.isfinite() else None for value in values[:FIRST_VALUES]],
    }


class Recorder:
    """Writes one trace. A call is a forward of the target; what the draft does belongs to the call before it."""

    def __init__(self, source: str, version: str, out: Path, tensors: bool, calls: int) -> None:
        self.source, self.version, self.out, self.tensors, self.calls = source, version, out, tensors, calls
        self.call, self.step, self.lines = -1, 0, 0
        self.done = False
        self.removers: list[Callable[[], None]] = []
        self._rows: tuple[list[int] | None, list[int] | None] = (None, None)
        self._file: Any = None

    @classmethod
    def from_environment(cls, source: str, version: str) -> "Recorder":
        out = Path(os.environ.get("EYAS_TRACE_OUT") or "eyas-trace")
        tensors = os.environ.get("EYAS_TRACE_TENSORS", "0") not in ("", "0")
        calls = os.environ.get("EYAS_TRACE_CALLS", "")
        return cls(source, version, out, tensors, int(calls) if calls.isdigit() else CALLS)

    def begin(
        self,
        ids: torch.Tensor | None,
        positions: torch.Tensor | None,
        taps: Sequence[torch.Tensor],
        boundaries: Sequence[int] | None,
    ) -> None:
        """A forward of the target: token ids and positions [R] of its rows, its taps [R, H] in their order."""
        self.call, self.step = self.call + 1, 0
        if self.call >= self.calls:
            self.close()
            return
        if boundaries is not None and len(boundaries) != len(taps):
            logger.warning("eyas_trace: %d states captured for boundaries %s", len(taps), list(boundaries))
        self._open(boundaries)
        self._rows = (as_list(ids), as_list(positions))
        for index, tap in enumerate(taps):
            known = boundaries is not None and len(boundaries) == len(taps)
            boundary = boundaries[index] if known and boundaries is not None else None
            self._write("tap", tap, index=index, boundary=boundary, ids=self._rows[0], positions=self._rows[1])

    def taps(self, taps: torch.Tensor) -> None:
        """What fc is given [R, A]: the first rows of the call, where the engine drops padding after them."""
        ids, positions = (None if rows is None or len(rows) < len(taps) else rows[: len(taps)] for rows in self._rows)
        self.step = 0
        self._write("taps", taps, ids=ids, positions=positions)

    def fc(self, output: torch.Tensor) -> None:
        self._write("fc", output, step=0)

    def layer(self, fed: torch.Tensor, ids: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        """A step of the draft: the state the next one is fed, with the ids it embedded and their positions."""
        self._write("layer", fed, step=self.step, ids=as_list(ids), positions=as_list(positions))
        self.step += 1

    def logits(self, logits: torch.Tensor) -> None:
        self._write("logits", logits, step=self.step - 1)

    @property
    def recording(self) -> bool:
        """Whether a call is open and not the last one over; false while a CUDA graph is captured."""
        return not self.done and self.call >= 0 and not capturing()

    def close(self) -> None:
        """Take every hook off."""
        self.done = True
        for remove in self.removers:
            remove()
        self.removers = []
        if self._file is not None:
            self._file.close()
            logger.info("eyas_trace: %d records in %s; the hooks are off", self.lines - 1, self.out)

    def _open(self, boundaries: Sequence[int] | None) -> None:
        if self._file is not None:
            return
        self.out = free(self.out)
        (self.out / TENSORS if self.tensors else self.out).mkdir(parents=True, exist_ok=True)
        self._file = (self.out / TRACE).open("x")
        header = {"format": FORMAT, "source": self.source, "version": self.version}
        self._line({**header, "boundaries": None if boundaries is None else list(boundaries)})
        logger.info("eyas_trace: recording %d calls into %s", self.calls, self.out)

    def _write(self, stage: str, tensor: torch.Tensor, **facts: Any) -> None:
        record = {"stage": stage, "call": self.call, **{k: v for k, v in facts.items() if v is not None}}
        record |= statistics(tensor)
        if self.tensors:
            record["tensor"] = f"{TENSORS}/{self.lines:06d}-{stage}.safetensors"
            save_file({"x": tensor.detach().cpu().contiguous()}, self.out / record["tensor"])
        self._line(record)

    def _line(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.lines += 1


def free(folder: Path) -> Path:
    """`folder`, or `folder-2`, `folder-3`, ... where it holds a trace already."""
    taken, number = folder, 1
    while (taken / TRACE).exists():
        number += 1
        taken = folder.with_name(f"{folder.name}-{number}")
    return taken


def as_list(rows: torch.Tensor | None) -> list[int] | None:
    """Ids or positions as integers; the first kind of position where a model has three."""
    if rows is None:
        return None
    return (rows[0] if rows.dim() == 2 else rows).tolist()


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def safely(recorder: Recorder, hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, its errors logged and the trace ended by them."""

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            logger.exception("eyas_trace: the trace ends here, the engine goes on")
            recorder.done = True

    return guarded


def attempt(what: str, work: Callable[..., Any], *args: Any) -> None:
    """Do `work`, or say in the log what was to be done and why it failed."""
    try:
        work(*args)
    except Exception:
        logger.exception("eyas_trace: could not %s; the engine goes on without", what)


def first_rank() -> bool:
    """Whether this process is the one that records: rank 0, or alone."""
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not spread or torch.distributed.get_rank() == int(os.environ.get("EYAS_TRACE_RANK", "0"))
