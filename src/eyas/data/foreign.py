"""Hidden states that other programs wrote, and traces, each read to one record.

| written by | layout |
|---|---|
| Eyas, or its plug-in in an engine | a trace folder (formats/trace.py) with tensors |
| SGLang, `--debug-tensor-dump-output-folder` | `target/TP0_PP0_Rank0_pid*/Pass*.pt`: module name to output |
| SGLang, `/generate` with `return_hidden_states` | JSON, `meta_info.hidden_states` |
| vLLM's hidden-state connector | `*.safetensors`: `token_ids` [T], `hidden_states` [T, k, H] |
| per-sample dumps | `aux_0.pt`, `aux_1.pt`, ..., `final.pt`, and the ids |

States in fp8 (e4m3) are multiplied with their scales, a token's each: `x_scale` beside a trace's `x`,
`hidden_states_scale` beside `hidden_states` ([T] or [T, k]), `aux_0_scale.pt` beside `aux_0.pt`.

Shapes: T rows (tokens), H hidden, A width of the concatenated taps, k taps.
"""

import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.data.shards import NormState
from eyas.data.tensor_dump import read_tensor_dump
from eyas.errors import InputError
from eyas.formats.trace import Record, Trace, is_trace, read_trace
from eyas.models.dequantise import from_fp8_rows

IDS = ("input_ids.pt", "token_ids.pt", "ids.pt")
AUX = re.compile(r"aux_(\d+)\.pt")


@dataclass(frozen=True, eq=False)
class Dump:
    """One text's states: row t belongs to token t of `ids`, whose first is the text's first."""

    id: str
    source: str
    ids: tuple[int, ...]
    taps_TA: Tensor
    count: int | None
    """How many taps lie side by side; None where the file does not say."""
    declared: tuple[int, ...] | None = None
    """The boundaries its writer says they are."""
    last_hidden_TH: Tensor | None = None
    last_hidden_norm: NormState | None = None
    """None: unknown."""

    def blocks(self, hidden_size: int) -> list[Tensor]:
        """The taps, [T, H] each. Raises InputError where they are not that wide."""
        width = self.taps_TA.shape[-1]
        if width % hidden_size or (self.count is not None and self.count * hidden_size != width):
            several = "several" if self.count is None else str(self.count)
            raise InputError(
                wanted=f"{several} states of width {hidden_size} side by side",
                got=f"width {width}",
                where=f"{self.source} {self.id}",
                next="give the target that was served (--target)",
            )
        return list(self.taps_TA.split(hidden_size, dim=-1))

    def cut(self, length: int) -> "Dump":
        """The first `length` rows."""
        last = None if self.last_hidden_TH is None else self.last_hidden_TH[:length]
        return replace(self, ids=self.ids[:length], taps_TA=self.taps_TA[:length], last_hidden_TH=last)


def read_dumps(path: Path, ids: Sequence[int] | None = None) -> list[Dump]:
    """Whatever lies at `path`, told apart by its layout. `ids` are the text's where the files do not hold them.

    Raises InputError for an unknown layout, and for files that are cut, of a wrong shape, or without ids.
    """
    if is_trace(path):
        return dumps_of_trace(read_trace(path))
    if path.suffix == ".json":
        return read_sglang_responses(path, ids)
    if path.suffix == ".safetensors":
        return [read_connector_file(path)]
    if path.is_dir():
        if next(path.glob("**/Pass*.pt"), None) is not None:
            return [tensor_dump(path)]
        if found := sorted({file.parent for file in path.glob("**/aux_*.pt")}):
            return [read_sample_folder(folder, ids) for folder in found]
        if found := sorted(path.glob("*.safetensors")):
            return [read_connector_file(file) for file in found]
    raise InputError(
        wanted="a trace folder, a tensor dump of SGLang, a /generate response (JSON), vLLM's hidden-state files, or"
        " aux_0.pt, ..., final.pt",
        got="no such file or folder" if not path.exists() else "none of these",
        where=str(path),
        next="docs/trace.md lists what is read",
    )


# Per-sample dumps ---------------------------------------------------------------------------------------------------


def read_sample_folder(folder: Path, ids: Sequence[int] | None = None) -> Dump:
    """`aux_0.pt`, `aux_1.pt`, ... and `final.pt`: the writer's hidden_states = [aux_0, aux_1, ..., final].

    Training takes all but the last. States are [T, H] or [1, T, H]. Ids lie beside them (input_ids.pt, token_ids.pt or
    ids.pt) or are given.
    """
    numbered = {int(match[1]): file for file in folder.iterdir() if (match := AUX.fullmatch(file.name))}
    missing = [f"aux_{number}.pt" for number in range(len(numbered)) if number not in numbered]
    if missing or not numbered:
        raise _unreadable(folder, f"no {', '.join(missing or ['aux_0.pt'])}", "aux_0.pt, aux_1.pt, ... without a gap")
    aux = [_states(numbered[number]) for number in range(len(numbered))]
    final = _states(folder / "final.pt") if (folder / "final.pt").is_file() else None
    for name, states in [*((f"aux_{index}.pt", one) for index, one in enumerate(aux)), ("final.pt", final)]:
        if states is not None and states.shape != aux[0].shape:
            wanted = f"the shape of aux_0.pt, {tuple(aux[0].shape)}"
            raise _unreadable(folder / name, f"states of shape {tuple(states.shape)}", wanted)
    found = next((folder / name for name in IDS if (folder / name).is_file()), None)
    if found is not None:
        ids = _tensor(found).flatten().tolist()
    known = _ids(ids, len(aux[0]), folder, f"one of {', '.join(IDS)} beside the states")
    return Dump(folder.name, "per-sample dump", known, torch.cat(aux, dim=-1), len(aux), last_hidden_TH=final)


def _states(path: Path) -> Tensor:
    states = _tensor(path)
    scale = path.with_name(f"{path.stem}_scale.pt")
    if states.dim() == 3 and states.shape[0] == 1:
        states = states[0]
    if states.dim() != 2 or not states.is_floating_point():
        raise _unreadable(path, f"{states.dtype} of shape {tuple(states.shape)}", "states [T, H]")
    return _scaled(states, _tensor(scale) if scale.is_file() else None, path)


def _scaled(states_TW: Tensor, scale: Tensor | None, path: Path) -> Tensor:
    """fp8 states times their scales; others as they are. Raises InputError for scales of another shape."""
    if states_TW.dtype != torch.float8_e4m3fn:
        return states_TW
    if scale is not None:
        each, over = divmod(scale.numel(), len(states_TW))
        if over or not each or states_TW.shape[-1] % each:
            wanted = f"one scale a token, or one a token and block, for states {tuple(states_TW.shape)}"
            raise _unreadable(path, f"scales of shape {tuple(scale.shape)}", wanted)
    return from_fp8_rows(states_TW, scale)


def _tensor(path: Path) -> Tensor:
    found = load_pt(path)
    if not isinstance(found, Tensor):
        raise _unreadable(path, f"a {type(found).__name__}", "a tensor")
    return found


def load_pt(path: Path) -> Any:
    """A .pt file of tensors, by torch's loader that runs no code. Raises InputError for a cut file or another."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _unreadable(path, why, "a whole .pt file of plain tensors") from error


# vLLM ---------------------------------------------------------------------------------------------------------------


def read_connector_file(path: Path) -> Dump:
    """vLLM's ExampleHiddenStatesConnector: `token_ids` [T], `hidden_states` [T, k, H], ascending boundaries."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, str(error), "a whole safetensors file") from error
    states, ids = tensors.get("hidden_states"), tensors.get("token_ids")
    if states is None or ids is None:
        names = ", ".join(sorted(tensors)) or "nothing"
        raise _unreadable(path, names, "hidden_states [T, k, H] and token_ids [T], as vLLM's connector writes them")
    if states.dim() != 3 or ids.dim() != 1 or len(states) != len(ids):
        shapes = f"hidden_states {tuple(states.shape)}, token_ids {tuple(ids.shape)}"
        raise _unreadable(path, shapes, "hidden_states [T, k, H] and token_ids [T]")
    taps = _scaled(states.flatten(1), tensors.get("hidden_states_scale"), path)
    return Dump(path.stem, "vLLM connector", tuple(ids.tolist()), taps, states.shape[1])


# SGLang's responses -------------------------------------------------------------------------------------------------


def read_sglang_responses(path: Path, ids: Sequence[int] | None = None) -> list[Dump]:
    """What `/generate` answered under --enable-return-aux-hidden-states: one object or a list of them.

    The prompt's ids are no part of an answer: put them beside it as `input_ids`, or give them.
    """
    try:
        answers = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error), "the JSON that /generate answered") from error
    answers = answers if isinstance(answers, list) else [answers]
    return [_response(answer, path, number, ids) for number, answer in enumerate(answers)]


def _response(answer: Any, path: Path, number: int, given: Sequence[int] | None) -> Dump:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    parts = meta.get("hidden_states") if isinstance(meta, dict) else None
    if not isinstance(answer, dict) or not isinstance(meta, dict) or not isinstance(parts, list) or not parts:
        raise _unreadable(
            path, "no meta_info.hidden_states", 'an answer to a request with "return_hidden_states": true'
        )
    rows = [row for part in parts for row in (part if part and isinstance(part[0], list) else [part])]
    try:
        taps = torch.tensor(rows, dtype=torch.float32)
    except (ValueError, TypeError) as error:
        raise _unreadable(path, str(error), "rows of floats, all of one width") from error
    if taps.dim() != 2:
        raise _unreadable(path, f"rows of shape {tuple(taps.shape[1:])}", "rows of floats, all of one width")
    prompt = given if given is not None else answer.get("input_ids")
    cached = meta.get("cached_tokens") or 0
    if cached:
        wanted = "states of every token of the prompt"
        raise _unreadable(path, f"{cached} tokens came from the prefix cache, whose states are not returned", wanted)
    output = answer.get("output_ids") or []
    for name, one in (("input_ids", prompt), ("output_ids", output)):
        if one is not None and not (isinstance(one, Sequence) and all(type(token) is int for token in one)):
            raise _unreadable(path, f"{name} that are no list of integers", "token ids")
    whole = None if prompt is None else [*prompt, *output]
    advice = "the prompt's ids, as `input_ids` beside meta_info"
    known = _ids(whole, len(taps), path, advice, longer=True)
    return Dump(str(meta.get("id", number)), "SGLang response", known, taps, None)


# SGLang's tensor dump -----------------------------------------------------------------------------------------------


def tensor_dump(folder: Path) -> Dump:
    """The target's boundaries that a tensor dump shows (data/tensor_dump.py), of its first text."""
    states, ids, last = read_tensor_dump(folder, load_pt)
    order = tuple(sorted(states))
    taps = torch.cat([states[boundary] for boundary in order], dim=-1)
    norm: NormState | None = None if last is None else "after"
    return Dump(folder.name, "SGLang tensor dump", ids, taps, len(order), order, last, norm)


# Traces -------------------------------------------------------------------------------------------------------------


def dumps_of_trace(trace: Trace) -> list[Dump]:
    """The texts of a trace, put together from its calls.

    A call's rows start where the rows kept before it end: what it computes anew (after refused drafted tokens) replaces
    the old. Rows that start beyond the latest text (a cached prefix) are left out. Raises InputError where the
    trace holds no tensors, or no states.
    """
    texts: list[tuple[list[int], list[Tensor]]] = []
    count = None
    for _, records in trace.calls():
        found = _call(trace, records)
        if found is None:
            continue
        ids, positions, states_TA, taps = found
        count = taps
        whole = runs(positions)
        for first, end in whole:
            # Rows that go on are one text's only where they are alone: beside others they may be a tree's branches.
            if positions[first] == 0 or len(whole) == 1:
                _place(texts, positions[first], ids[first:end], states_TA[first:end])
    if not texts:
        no_tensors = any(record.tensor is None for record in trace.of("tap") + trace.of("taps"))
        raise InputError(
            wanted="a trace with the tensors of its taps, and their ids",
            got="statistics only" if no_tensors else "no taps of a text from its first token on",
            where=str(trace.folder),
            next="trace again with --tensors (in an engine: EYAS_TRACE_TENSORS=1, prefix caching off)",
        )
    declared = trace.header.boundaries
    return [
        Dump(f"text {number}", f"trace ({trace.header.source})", tuple(ids), torch.stack(rows), count, declared)
        for number, (ids, rows) in enumerate(texts)
    ]


def _call(trace: Trace, records: list[Record]) -> tuple[list[int], list[int], Tensor, int] | None:
    """Ids, positions, concatenated taps of one call's rows, and how many taps; None where it has none.

    The target's own taps where recorded, for norms may lie before fc; cut to the rows that fc was given, for an engine
    may pad its forward.
    """
    fed = next((one for one in records if one.stage == "taps"), None)
    taps = [one for one in records if one.stage == "tap"]
    used = [one for one in taps or ([fed] if fed else []) if one.tensor is not None]
    if not used or used[0].ids is None or used[0].positions is None:
        return None
    states = torch.cat([trace_tensor(trace, one) for one in used], dim=-1)
    ids, positions = list(used[0].ids), list(used[0].positions)
    rows = min(len(ids), len(positions), len(states))
    if fed is not None and trace.header.source != "eyas":
        rows = min(rows, fed.shape[-2])
    known = trace.header.boundaries
    count = len(taps) if taps else len(known) if known else 1
    return ids[:rows], positions[:rows], states[:rows], count


def trace_tensor(trace: Trace, record: Record) -> Tensor:
    """A record's tensor [T, width]. Raises InputError for a file that is cut."""
    assert record.tensor is not None, "only records with tensors"
    path = trace.folder / record.tensor
    try:
        tensors = load_file(path)
        return _scaled(tensors["x"].flatten(0, -2), tensors.get("x_scale"), path)
    except (OSError, SafetensorError, KeyError) as error:
        raise _unreadable(path, str(error), "a whole safetensors file with the tensor x") from error


def runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Where rows of consecutive positions begin and end: an engine's batch holds several texts."""
    if not positions:
        return []
    starts = [row for row in range(len(positions)) if row == 0 or positions[row] != positions[row - 1] + 1]
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))


def _place(texts: list[tuple[list[int], list[Tensor]]], start: int, ids: list[int], states_TA: Tensor) -> None:
    if start == 0:
        texts.append((list(ids), list(states_TA)))
        return
    if texts and len(texts[-1][0]) >= start:
        texts[-1][0][start:], texts[-1][1][start:] = ids, list(states_TA)


def _ids(ids: Sequence[int] | None, rows: int, where: Path, advice: str, longer: bool = False) -> tuple[int, ...]:
    """The ids of `rows` rows; `longer` lists may go on (the newest token has no state yet)."""
    if ids is None:
        raise InputError(
            wanted=f"the token ids of {rows} rows of states", got="none", where=str(where), next=f"put {advice}"
        )
    if len(ids) < rows or (len(ids) > rows and not longer):
        raise _unreadable(where, f"{len(ids)} ids for {rows} rows", "one row of states a token")
    return tuple(ids[:rows])


def _unreadable(path: Path, got: str, wanted: str) -> InputError:
    return InputError(wanted=wanted, got=got, where=str(path), next="dump it again (docs/trace.md lists what is read)")
