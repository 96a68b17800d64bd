"""`eyas inspect PATH`: what a folder or file is, its taps in every dialect, its problems. No torch; of weights the
headers, and of a draft whether its numbers are finite.

Findings are no failure: only a path that cannot be read is an InputError.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.formats.config_problems import layer_of
from eyas.formats.engines import parse_engine
from eyas.formats.headers import INDEX, WEIGHTS, TensorHeader, read_headers
from eyas.formats.names import canonical_name
from eyas.formats.problem import Problem
from eyas.formats.read_config import DraftFile, is_draft, read_config
from eyas.formats.taps import captures, default_boundaries
from eyas.formats.target_config import TEXT_CONFIGS
from eyas.formats.tensor_list import check_layout, layout_of, read_list
from eyas.formats.tensor_values import value_problems
from eyas.formats.trace import is_trace, read_trace
from eyas.run import JSON, MANIFEST, hash_file, read_manifest, verify_files
from eyas.shipped import read_card
from eyas.stage import PROGRESS, RESULT
from eyas.wiring.findings import Finding, findings
from eyas.wiring.loaders import loader_report
from eyas.wiring.static_checks import find_target

DIALECTS = {"sglang": "sglang", "vllm": "vllm/v2", "vllm_v1": "vllm/v1", "llamacpp": "llamacpp"}
CONFIG = "config.json"


def inspect_path(path: Path, verify: bool = False, engines: Sequence[str] = (), target: str | None = None) -> JSON:
    """What `path` is. Keys: `kind`, `path`, `findings`, and by kind those of docs/commands.md.

    `verify` re-hashes a stage folder's data. `engines` adds, for a draft, what each would do with it on `target` (a
    folder, a config.json, or a name in the caches). Raises InputError for what cannot be read or is none of Eyas's
    business.
    """
    path = path.absolute()
    if target is not None and not engines:
        raise InputError(
            wanted="--engine beside --target",
            got="--target alone",
            where="inspect",
            next="--engine sglang --engine vllm",
        )
    try:
        seen = _inspect(path, verify)
        return seen | _engines(path, seen, engines, target) if engines else seen
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _engines(path: Path, seen: JSON, engines: Sequence[str], target: str | None) -> JSON:
    """What each engine would do with the draft at `path`."""
    if "dialects" not in seen and seen["kind"] != "tensors":
        raise InputError(
            wanted="a draft to hold before an engine", got=seen["kind"], where=str(path), next="eyas inspect RUN/export"
        )
    path = Path(seen["draft"] or path) if seen["kind"] == "run" else path
    facts = None if target is None else find_target(target)
    reports = [loader_report(path, engine, facts) for engine in engines]
    return {"engines": {str(report.engine): report.as_dict for report in reports}}


def _inspect(path: Path, verify: bool) -> JSON:
    if path.is_dir():
        return _folder(path, verify)
    if not path.is_file():
        raise _unreadable(path, "no such file or folder")
    if path.suffix == ".safetensors" or path.name.endswith(".index.json"):
        return _tensor_list(path, read_headers(path), config=None)
    if path.suffix == ".jsonl":
        return _prompts(path)
    if path.suffix != ".json":
        raise _unreadable(path, f"a {path.suffix or 'suffixless'} file")
    return _json_file(path, _read_json(path))


def _unreadable(path: Path, got: str) -> InputError:
    return InputError(
        wanted="a stage folder, a draft or target folder, config.json, a safetensors file, a tensor list or JSONL",
        got=got,
        where=str(path),
        next="eyas inspect RUN/export",
    )


def _read_json(path: Path) -> JSON:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, f"no readable JSON ({error})") from error
    if not isinstance(raw, dict):
        raise _unreadable(path, f"JSON that is a {type(raw).__name__}, not an object")
    return raw


# Folders ----------------------------------------------------------------------------------------------------------


def _folder(path: Path, verify: bool) -> JSON:
    if (path / MANIFEST).is_file():
        return _stage(path, verify)
    if is_trace(path):
        return _trace(path)
    if (path / CONFIG).is_file():
        return _model_folder(path)
    if (path / WEIGHTS).is_file() or (path / INDEX).is_file():
        return _tensor_list(path, read_headers(path), config=None)
    if made := [path / name for name in RUN if (path / name / MANIFEST).is_file()]:
        return _run(path, made, verify)
    found = sorted(item.parent.name for item in path.glob(f"*/{CONFIG}"))
    if (path / PROGRESS).is_file():
        error = _unreadable(path, f"a stage that is not finished: {PROGRESS}, and no {MANIFEST}")
        error.next = "run its command again: it resumes"
        raise error
    got = f"a folder without {CONFIG}" + (f"; its sub-folders {', '.join(found)} have one" if found else "")
    error = _unreadable(path, got)
    error.next = f"eyas inspect {path / found[-1]}" if found else error.next
    raise error


RUN = ("prompts", "responses", "captures", "draft", "evaluate", "export", "check", "bench")
"""The folders of a run, in order; result.json is what the last stages have found."""
TOLD = {"evaluate": ("accept_length", "accept_length_walk"), "check": ("verdict",), "bench": ("speedup", "precision")}


def _run(path: Path, made: Sequence[Path], verify: bool) -> JSON:
    """A run: which stages are complete, what they found, and its draft, as exported where it is."""
    seen = {folder.name: _stage(folder, verify) for folder in made}
    draft = seen.get("export") or seen.get("draft")
    found = {
        name: {key: result.get(key) for key in keys}
        for name, keys in TOLD.items()
        if name in seen and (result := _read_json(path / name / RESULT))
    }
    return {
        "kind": "run",
        "path": str(path),
        "stages": [{"name": name, "created": one["created"], "seconds": one["seconds"]} for name, one in seen.items()],
        "missing": [name for name in RUN if name not in seen],
        **found,
        "draft": None if draft is None else draft["path"],
        "boundaries": None if draft is None else draft.get("boundaries"),
        "dialects": None if draft is None else draft.get("dialects"),
        "findings": [
            one
            for name, stage in seen.items()
            for one in stage["findings"]
            if one["severity"] != "info" or name != "draft" or draft is stage  # an export has undone what these say
        ],
    }


def _trace(path: Path) -> JSON:
    """A trace that an engine left: it has no manifest, for nothing tells when an engine has ended."""
    trace = read_trace(path)
    stages = Counter(record.stage for record in trace.records)
    return {
        "kind": "trace",
        "path": str(path),
        "source": f"{trace.header.source} {trace.header.version}",
        "boundaries": None if trace.header.boundaries is None else list(trace.header.boundaries),
        "calls": len(dict(trace.calls())),
        "records": dict(stages),
        "tensors": any(record.tensor for record in trace.records),
        "findings": [],
    }


def _stage(path: Path, verify: bool) -> JSON:
    manifest = read_manifest(path)
    result: JSON = {
        "kind": manifest.stage,
        "path": str(path),
        "settings": manifest.settings,
        "facts": manifest.facts,
        "inputs": manifest.inputs,
        "files": len(manifest.files),
        "versions": manifest.versions,
        "created": manifest.created,
        "seconds": manifest.seconds,
        "findings": [],
    }
    if (path / CONFIG).is_file():
        result |= _model_folder(path) | {"stage": manifest.stage}
    elif manifest.stage == "draft" and ((step := path / manifest.facts.get("draft", "")) / CONFIG).is_file():
        result |= _model_folder(step) | {"stage": "draft", "path": str(path), "step": step.name}
    broken = verify_files(path) if verify else ()
    torn = {name: why for name, checksum in manifest.files.items() if (why := _torn(path / name, checksum))}
    if verify:
        result["verified"] = not broken
    corrupt = {**dict.fromkeys(broken, "other bytes"), **torn}
    result["findings"] = result["findings"] + _dump([_corrupt(path / name, why) for name, why in corrupt.items()], "")
    return result


SMALL = 2**20
"""Bytes up to which a file is hashed unasked."""


def _torn(path: Path, checksum: str) -> str | None:
    """What shows without reading large files that one is not what was written; None where nothing does."""
    if not path.is_file():
        return "no such file"
    try:
        if path.suffix == ".safetensors":
            read_headers(path)
    except InputError as error:
        return error.got
    small = path.stat().st_size <= SMALL
    return "other bytes" if small and hash_file(path) != checksum else None


def _corrupt(path: Path, found: str) -> Problem:
    expected, fix = "the bytes that the manifest's checksum is of", "make the stage again"
    return Problem("data_corrupt", where=str(path), expected=expected, found=found, fix=fix)


def _model_folder(path: Path) -> JSON:
    raw = _read_json(path / CONFIG)
    weights = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    if not is_draft(raw):
        return _target(path, raw)
    card = read_card(path)
    known = {} if card is None else {"card": card.model_dump(mode="json")}
    return _draft(path, raw, read_headers(path) if weights else None) | known


# Models -----------------------------------------------------------------------------------------------------------


def _json_file(path: Path, raw: JSON) -> JSON:
    if isinstance(raw.get("tensors"), Mapping):
        hint = raw.get("config_hint")
        return _tensor_list(path, read_list(raw, path.name), config=hint if isinstance(hint, Mapping) else None)
    if "stage" in raw and "settings" in raw:
        return _folder(path.parent, verify=False)
    return _draft(path, raw, None) if is_draft(raw) else _target(path, raw)


def _draft(path: Path, raw: JSON, headers: dict[str, TensorHeader] | None) -> JSON:
    file = read_config(raw)
    problems = list(file.problems)
    if headers is not None:
        problems += check_layout(headers, raw, file.config)
        problems += value_problems(path, headers)
    return {
        "kind": "draft",
        "path": str(path),
        "format": file.format,
        "method": file.method,
        "architectures": raw.get("architectures"),
        "boundaries": None if file.boundaries is None else list(file.boundaries),
        "ids_ambiguous": file.ids_ambiguous,
        "boundaries_source": file.boundaries_source,
        "dialects": _dialects(file),
        "target": file.target.model_dump(mode="json") if file.target else None,
        "tensors": None if headers is None else _table(headers),
        "findings": _dump(problems, path.name),
    }


def _dialects(file: DraftFile) -> JSON:
    """What each reader would capture at its newest known release."""
    table: JSON = {}
    for key, name in DIALECTS.items():
        if key == "sglang" and file.format == "speculators":
            table[key] = {"captures": None, "rule": "SGLang does not read the speculators format"}
            continue
        found = captures(parse_engine(name), file.keys, file.target_type, file.target_layers)
        boundaries = None if found.boundaries is None else list(found.boundaries)
        table[key] = {"captures": boundaries, "rule": found.rule}
    return table


def _target(path: Path, raw: JSON) -> JSON:
    """A model's own config.json (its text part, wherever a multimodal one keeps it)."""
    text = next((raw[name] for name in TEXT_CONFIGS if isinstance(raw.get(name), Mapping)), raw)
    layers = text.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise _unreadable(path, "JSON that is neither a draft's nor a model's config.json")
    return {
        "kind": "target",
        "path": str(path),
        "architectures": raw.get("architectures"),
        "model_type": text.get("model_type", raw.get("model_type")),
        "num_hidden_layers": layers,
        "hidden_size": text.get("hidden_size"),
        "vocab_size": text.get("vocab_size"),
        "boundaries": list(default_boundaries(layers)) if layers >= 7 else None,
        "boundaries_source": "the default [2, n//2, n-3]" if layers >= 7 else "fewer than 7 layers: taps must be given",
        "findings": [],
    }


def _tensor_list(path: Path, headers: dict[str, TensorHeader], config: Mapping[str, Any] | None) -> JSON:
    problems = check_layout(headers, config or {}, None)
    return {
        "kind": "tensors",
        "path": str(path),
        "layout": layout_of(headers, config or {}),
        "config": None if config is None else dict(layer_of(config)),
        "tensors": _table(headers),
        "findings": _dump(problems, path.name),
    }


def _table(headers: dict[str, TensorHeader]) -> JSON:
    return {
        name: {
            "canonical": canonical_name(name),
            "shape": None if header.shape is None else list(header.shape),
            "dtype": header.dtype,
        }
        for name, header in headers.items()
    }


def _dump(problems: list[Problem], where: str) -> list[JSON]:
    return [_as_json(found) for found in findings(problems, where)]


def _as_json(found: Finding) -> JSON:
    return found.model_dump(mode="json")


# Prompts ----------------------------------------------------------------------------------------------------------


def _prompts(path: Path) -> JSON:
    """Counts of a JSONL file: which keys its records have and which lines are no JSON objects."""
    counts: dict[str, int] = {}
    records, broken = 0, []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                broken.append(number)
                continue
            records += 1
            for key in record:
                counts[key] = counts.get(key, 0) + 1
    return {
        "kind": "prompts" if {"messages", "conversations", "prompt"} & counts.keys() else "jsonl",
        "path": str(path),
        "records": records,
        "keys": counts,
        "broken_lines": broken[:20],
        "findings": _dump([_broken_lines(broken)] if broken else [], path.name),
    }


def _broken_lines(numbers: list[int]) -> Problem:
    return Problem(
        "data_corrupt",
        where=f"line {numbers[0]}",
        expected="one JSON object a line",
        found=f"{len(numbers)} lines that are not",
        fix="eyas prompts skips and counts them; --on-error stop names the first",
        severity="warning",
    )
