"""A trace folder: `trace.jsonl`, tensors if asked for, and how a trace is asked for. Torch-free.

The first line is the header, every other one a record of what stood at one stage of one forward. The embedded engine
(engine/trace.py) and the plug-ins for SGLang and vLLM (engine_side/, which import nothing of Eyas) write the same
lines, each flushed when it is written: a killed engine leaves a trace that reads up to that point.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from eyas.errors import InputError, did_you_mean

FORMAT = 1
TRACE = "trace.jsonl"
TENSORS = "tensors"
"""Folder of the tensors, one safetensors file a record, each with the one tensor `x`."""
FIRST_VALUES = 5
ENGINE_SIDE = Path(__file__).parents[1] / "engine_side"
"""What goes on the PYTHONPATH of an engine's interpreter."""

Stage = Literal["embedding", "tap", "taps", "fc", "layer", "logits", "accepted"]
"""`tap`: one boundary of the target's forward. `taps`: what the draft is fed, concatenated. `fc`, `layer`, `logits`:
the draft's own, `layer` being the state its next step is fed. `accepted`: what the round kept."""


class Header(BaseModel):
    """The first line."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int
    source: str
    """`eyas`, `vllm` or `sglang`."""
    version: str
    """The engine's."""
    boundaries: tuple[int, ...] | None = None
    """What the engine says it captures; None where it does not say."""
    target: str | None = None
    draft: str | None = None


class Record(BaseModel):
    """One stage of one forward. Row i of the tensor belongs to `ids[i]` at `positions[i]`, where these are given."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    stage: Stage
    call: int
    """Number of the target's forward it belongs to; a draft's step belongs to the forward before it."""
    text: int | None = None
    """Number of the text, where the engine decodes one at a time."""
    round: int | None = None
    """0 for a prompt's forwards."""
    step: int | None = None
    """Which of the draft's steps since the target's forward: 0 is the one fed with taps."""
    boundary: int | None = None
    index: int | None = None
    """Place of a tap among the call's taps."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    mean: float | None = None
    deviation: float | None = None
    norm: float | None = None
    """Of all values together (2-norm); None for any of the three where a value is not finite."""
    first: tuple[float | None, ...] = ()
    ids: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None
    tensor: str | None = None
    """File of the tensor, relative to the folder."""
    accepted: int | None = None
    drafted: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None
    """Of a tree: the row that each drafted token follows; row 0 is the last verified token, row i drafted[i - 1]."""
    chosen: tuple[int, ...] | None = None
    """The target's token after each row that stands: the accepted ones, then one more."""


@dataclass(frozen=True)
class Trace:
    """A trace as read."""

    folder: Path
    header: Header
    records: tuple[Record, ...]

    def of(self, stage: Stage) -> list[Record]:
        return [record for record in self.records if record.stage == stage]

    def calls(self) -> Iterator[tuple[int, list[Record]]]:
        """Records by the target's forward, in order."""
        groups: dict[int, list[Record]] = {}
        for record in self.records:
            groups.setdefault(record.call, []).append(record)
        yield from groups.items()


@dataclass(frozen=True)
class TraceRequest:
    """That a trace is wanted, where, and how much of it."""

    out: Path
    tensors: bool = False
    calls: int = 64
    """Forwards of the target after which nothing more is recorded."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "TraceRequest | None":
        """EYAS_TRACE=1, with EYAS_TRACE_OUT, EYAS_TRACE_TENSORS=1 and EYAS_TRACE_CALLS; None where it is off.

        The folder is a new one where the name is taken: a program may run several engines one after the other.
        """
        if environment.get("EYAS_TRACE", "0") in ("", "0"):
            return None
        out = Path(environment.get("EYAS_TRACE_OUT") or "eyas-trace")
        taken, number = out, 1
        while (taken / TRACE).exists():
            number += 1
            taken = out.with_name(f"{out.name}-{number}")
        calls = environment.get("EYAS_TRACE_CALLS", "")
        tensors = environment.get("EYAS_TRACE_TENSORS", "0") not in ("", "0")
        return cls(taken, tensors, int(calls) if calls.isdigit() else cls.calls)


ENGINES = {
    "vllm": ("--enforce-eager", "--no-enable-prefix-caching"),
    "sglang": ("--disable-cuda-graph", "--disable-radix-cache", "--skip-server-warmup"),
}
"""Flags under which an engine's forwards all pass Python, and no prompt's states come from a cache."""


def engine_environment(engine: str, out: Path) -> dict[str, Any]:
    """What to set and which flags to add so that `engine` writes a trace into `out`. Raises InputError for another."""
    name = engine.partition("@")[0]
    if name not in ENGINES:
        raise InputError(
            wanted=f"an engine: {', '.join(ENGINES)}",
            got=f"{engine!r}{did_you_mean(name, ENGINES)}",
            where="--engine",
            next="--engine vllm",
        )
    environment = {
        "PYTHONPATH": str(ENGINE_SIDE),
        "EYAS_TRACE": "1",
        "EYAS_TRACE_OUT": str(out.absolute()),
        "EYAS_TRACE_TENSORS": "1",
    }
    return {
        "environment": environment,
        "flags": list(ENGINES[name]),
        "then": f"send one prompt of 64 tokens or more, then: eyas check --trace {out} --draft DRAFT --target TARGET",
    }


def is_trace(path: Path) -> bool:
    return (path / TRACE).is_file() or (path.is_file() and path.name == TRACE)


def read_trace(path: Path) -> Trace:
    """A trace folder, or its trace.jsonl. A last line cut by a kill is left out.

    Raises InputError for a missing or newer file, a bad line, or a tensor that a record names and that is not there.
    """
    file = path / TRACE if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            wanted=f"a trace folder (one with {TRACE})", got="none", where=str(path), next="eyas trace --help"
        )
    lines = file.read_text(errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    if not lines:
        raise _bad_line(file, 1, "an empty file")
    header = _parse(Header, file, 1, lines[0])
    if header.format > FORMAT:
        raise InputError(
            wanted=f"a trace of format {FORMAT} or older",
            got=f"format {header.format}",
            where=str(file),
            next="pip install --upgrade eyas",
        )
    records = tuple(_parse(Record, file, number, line) for number, line in enumerate(lines[1:], start=2))
    lost = next((one.tensor for one in records if one.tensor and not (file.parent / one.tensor).is_file()), None)
    if lost is not None:
        raise InputError(
            wanted=f"the tensor {lost} that the trace names",
            got="no such file",
            where=str(file),
            next="copy the whole trace folder, or trace again",
        )
    return Trace(file.parent, header, records)


Line = TypeVar("Line", Header, Record)


def _parse(model: type[Line], file: Path, number: int, line: str) -> Line:
    try:
        return model.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _bad_line(file, number, f"{place or 'the line'}: {first['msg']}") from error
    except ValueError as error:
        raise _bad_line(file, number, str(error)) from error


def _bad_line(file: Path, number: int, got: str) -> InputError:
    return InputError(
        wanted="lines of a trace, the header first", got=got, where=f"{file}, line {number}", next="trace again"
    )
