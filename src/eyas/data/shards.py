"""Packed captures: how samples are laid into batches and shard files, and the reader that checks before it trusts.

A capture folder: `shard-00000.safetensors` ... with `taps` [T, A], `last_hidden` [T, H] (boundary n, before the final
norm), `input_ids` [T] int32, `loss_mask` [T] uint8, samples one after another; `index.json` with
{"samples": [{"id", "split", "shard", "start", "length", "prompt_tokens"}]}; checksums and facts in the manifest.
States may be stored in fp8 (e4m3) with their scales beside them, `taps_scale` [T] or [T, k] (one a tap) and
`last_hidden_scale` [T]: what is read is state times scale, in float32.

Shapes: T rows (tokens), A width of the concatenated taps, H hidden.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas.errors import InputError
from eyas.formats.draft_config import TargetIdentity
from eyas.models.dequantise import from_fp8_rows
from eyas.run import check_same, disk_error, hash_file, read_manifest

NormState = Literal["before", "after"]
"""Whether a last hidden state is from before or after the target's final norm."""
INDEX = "index.json"
LACKING = "capture_incomplete"
SCALES = ("taps_scale", "last_hidden_scale")
STORED = ("taps", "last_hidden", "input_ids", "loss_mask")


class DamagedCaptures(InputError):
    """Captures that are not what their manifest and index say; its `code` is the finding it is."""


@dataclass(frozen=True)
class Entry:
    """Where one sample's rows lie."""

    id: str
    split: str
    shard: str
    start: int
    length: int
    prompt_tokens: int


@dataclass(frozen=True, eq=False)
class Sample:
    """One captured sample. Row t holds the states of token t; `loss_mask_T` marks the answer's tokens."""

    id: str
    split: str
    taps_TA: Tensor
    last_hidden_TH: Tensor
    ids_T: Tensor
    loss_mask_T: Tensor

    def cut(self, length: int) -> "Sample":
        """The first `length` rows."""
        rows = (self.taps_TA, self.last_hidden_TH, self.ids_T, self.loss_mask_T)
        return Sample(self.id, self.split, *(tensor[:length] for tensor in rows))


def plan_shards(lengths: Sequence[int], batch_tokens: int, shard_tokens: int) -> list[list[list[int]]]:
    """Shards of batches of sample numbers: shortest first, so that a batch holds similar lengths.

    A batch has at most `batch_tokens` tokens, padding counted, and a shard at most `shard_tokens` without padding,
    save where one sample alone is longer. Every sample appears once.
    """
    shards: list[list[list[int]]] = []
    in_shard = 0
    for number in sorted(range(len(lengths)), key=lambda number: (lengths[number], number)):
        length = lengths[number]
        if not shards or in_shard + length > shard_tokens:
            shards.append([])
            in_shard = 0
        batches = shards[-1]
        if not batches or (len(batches[-1]) + 1) * length > batch_tokens:  # the newest is the longest
            batches.append([])
        batches[-1].append(number)
        in_shard += length
    return shards


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def write_shard(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a shard by temporary file, fsync and rename; its sha256. Raises InputError when the disk is full."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # safetensors makes them 0600, and captures are read by other people's jobs
        checksum = hash_file(temporary)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error if isinstance(error, OSError) else OSError(str(error))) from error
    return checksum


def write_index(entries: Sequence[Entry]) -> str:
    """The text of index.json."""
    return json.dumps({"samples": [asdict(entry) for entry in entries]}, indent=0) + "\n"


class Samples(Protocol):
    """Samples with their states, wherever these come from: shards on disk (`CaptureReader`), or the target itself, run
    when a sample is asked for (`data/online.py`). The same responses give the same samples in the same order."""

    boundaries: tuple[int, ...]
    last_hidden_norm: NormState
    greedy: bool
    samples: list[Entry]

    def read_all(self, numbers: Sequence[int]) -> list[Sample]: ...

    def mask(self, number: int) -> Tensor: ...

    def ids(self, number: int) -> list[int]: ...

    def of_split(self, split: str) -> list[int]: ...


class CaptureReader:
    """Read samples of a complete capture folder; shard files are memory-mapped and opened once.

    On opening, index, manifest and every shard's header are compared. Raises InputError for a missing or cut shard, an
    index that does not fit, or, with `expect`, states of another target.
    """

    def __init__(self, folder: Path, expect: TargetIdentity | None = None) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder, "captures")
        facts = self.manifest.facts
        self.identity = TargetIdentity.model_validate(facts["target"])
        self.boundaries: tuple[int, ...] = tuple(facts["boundaries"])
        self.hidden_size = self.identity.hidden_size
        self.taps_width = len(self.boundaries) * self.hidden_size
        self.last_hidden_norm: NormState = facts["last_hidden_norm"]
        self.greedy: bool = facts["greedy"]
        if expect is not None:
            for field in ("weights_hash", "num_hidden_layers", "hidden_size", "vocab_size"):
                check_same(
                    f"target {field}",
                    getattr(expect, field),
                    getattr(self.identity, field),
                    folder,
                    f"use the captures' own target ({self.identity.name}), or capture again",
                )
        self.samples = self._read_index()
        self._files = {name: self._open(name) for name in sorted({entry.shard for entry in self.samples})}
        self._check_rows()

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, number: int) -> Sample:
        """Sample `number` of `samples`, copied out of its shard."""
        entry = self.samples[number]
        rows = slice(entry.start, entry.start + entry.length)
        taps, hidden = (self._states(entry.shard, name, rows) for name in ("taps", "last_hidden"))
        ids, mask = (self._files[entry.shard].get_slice(name)[rows] for name in ("input_ids", "loss_mask"))
        return Sample(entry.id, entry.split, taps, hidden, ids.long(), mask.bool())

    def read_all(self, numbers: Sequence[int]) -> list[Sample]:
        """These samples, in this order."""
        return [self.read(number) for number in numbers]

    def _states(self, shard: str, name: str, rows: slice) -> Tensor:
        file = self._files[shard]
        states = file.get_slice(name)[rows]
        if states.dtype != torch.float8_e4m3fn:
            return states
        scale = f"{name}_scale"
        return from_fp8_rows(states, file.get_slice(scale)[rows] if scale in file.keys() else None)  # noqa: SIM118

    def mask(self, number: int) -> Tensor:
        """The loss mask [T] of sample `number`, without its states."""
        entry = self.samples[number]
        return self._files[entry.shard].get_slice("loss_mask")[entry.start : entry.start + entry.length].bool()

    def ids(self, number: int) -> list[int]:
        """The token ids of sample `number`, without its states."""
        entry = self.samples[number]
        return self._files[entry.shard].get_slice("input_ids")[entry.start : entry.start + entry.length].tolist()

    def of_split(self, split: str) -> list[int]:
        """Numbers of the samples of a split."""
        return [number for number, entry in enumerate(self.samples) if entry.split == split]

    def _read_index(self) -> list[Entry]:
        path = self.folder / INDEX
        if not path.is_file():
            raise self._damaged("no such file", INDEX, LACKING)
        if hash_file(path) != self.manifest.files.get(INDEX):
            raise self._damaged("other bytes than the manifest's checksum", INDEX)
        try:
            return [Entry(**entry) for entry in json.loads(path.read_text())["samples"]]
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"{type(error).__name__}: {error}", INDEX) from error

    def _open(self, name: str) -> Any:
        path = self.folder / name
        if name not in self.manifest.files:
            raise self._damaged("the index names it, the manifest does not", name, LACKING)
        if not path.is_file():
            raise self._damaged("no such file", name, LACKING)
        try:
            file: Any = safe_open(path, framework="pt")
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in STORED}
        except SafetensorError as error:  # a cut file, a bad header, a missing tensor
            raise self._damaged(str(error), name) from error
        rows = shapes["input_ids"][0]
        wrong = [key for key in SCALES if key in file.keys() and file.get_slice(key).get_shape()[0] != rows]  # noqa: SIM118
        if wrong:
            raise self._damaged(f"{', '.join(wrong)} of another length than the ids", name)
        wanted = {"taps": (rows, self.taps_width), "last_hidden": (rows, self.hidden_size), "loss_mask": (rows,)}
        for key, shape in wanted.items():
            if shapes[key] != shape:
                raise self._damaged(f"{key} of shape {shapes[key]}, not {shape}", name)
        return file

    def _check_rows(self) -> None:
        """The samples of each shard must cover its rows exactly, none twice."""
        filled = dict.fromkeys(self._files, 0)
        for entry in sorted(self.samples, key=lambda entry: (entry.shard, entry.start)):
            if entry.start != filled[entry.shard] or entry.length < 1:
                got = f"sample {entry.id} starts at row {entry.start}, not {filled[entry.shard]}"
                raise self._damaged(got, entry.shard, LACKING)
            filled[entry.shard] += entry.length
        for name, file in self._files.items():
            rows = file.get_slice("input_ids").get_shape()[0]
            if rows != filled[name]:
                raise self._damaged(f"{rows} rows, of which the index knows {filled[name]}", name, LACKING)

    def _damaged(self, got: str, name: str, code: str = "data_corrupt") -> DamagedCaptures:
        return DamagedCaptures(
            code=code,
            wanted="a capture folder as its manifest and index describe it",
            got=got,
            where=str(self.folder / name),
            next=f"remove {self.folder / 'manifest.json'} and that file, then run the capture stage again",
        )


def pack(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The tensors of a shard that holds `samples` in this order."""
    return {
        "taps": torch.cat([sample.taps_TA for sample in samples]),
        "last_hidden": torch.cat([sample.last_hidden_TH for sample in samples]),
        "input_ids": torch.cat([sample.ids_T for sample in samples]).to(torch.int32),
        "loss_mask": torch.cat([sample.loss_mask_T for sample in samples]).to(torch.uint8),
    }
