"""The folder SGLang and vLLM both load: `config.json` and `model.safetensors`, refused whole or written whole.

Tensor names come from `formats/names.py` (`midlayer.*` for one layer), keys from `formats/config_json.py`. Nothing is
written where an engine asked for would serve another draft than the one given.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import mkdtemp

from safetensors.torch import save

from eyas.errors import InputError
from eyas.export import sglang, vllm
from eyas.formats.config_json import tap_keys, to_json
from eyas.formats.draft_config import DraftConfig
from eyas.formats.engines import Engine, parse_engine
from eyas.formats.names import exported_names
from eyas.formats.taps import TapKeys, captures, ids_for
from eyas.models.checkpoint import CONFIG, WEIGHTS, draft_tensors, has_info, load_draft
from eyas.models.draft import Draft
from eyas.models.foreign import NamedTarget, name_target
from eyas.recipe import ExportSettings, TargetSettings
from eyas.run import (
    JSON,
    Manifest,
    disk_error,
    hash_file,
    is_complete,
    manifest_hash,
    read_manifest,
    write_atomic,
    write_manifest,
)
from eyas.stage import say_complete

CANNOT: dict[str, Callable[[DraftConfig, Engine], list[str]]] = {"sglang": sglang.cannot, "vllm": vllm.cannot}


def export_draft(
    draft_folder: Path,
    out: Path,
    settings: ExportSettings,
    target: TargetSettings | None = None,
    boundaries: Sequence[int] | None = None,
) -> Manifest:
    """Write the draft (a folder with config.json, or a training folder: the step it hands on) for `settings.engines`.

    A draft made elsewhere needs its `target`, and `boundaries` where its layer ids do not say theirs. Raises
    InputError, with nothing written, where an engine cannot represent the draft or `out` holds something else.
    """
    started = time.monotonic()
    recorded = settings.model_dump(mode="json")
    inputs = {"draft": draft_folder} if is_complete(draft_folder) else {}
    _check_free(out)
    if (done := exported_before(out, recorded, inputs)) is not None:
        say_complete(out, "export")
        return done
    draft, info = load_draft(draft_folder, foreign=named(draft_folder, target), boundaries=boundaries)
    content = export_config(draft, info.model_dump(mode="json"), settings)
    files = {WEIGHTS: save(exported_tensors(draft), metadata={"format": "pt"}), CONFIG: json.dumps(content, indent=1)}
    temporary = _sibling(out)
    try:
        for name, data in files.items():
            write_atomic(temporary / name, data)
        manifest = write_manifest(
            temporary,
            "export",
            settings=recorded,
            inputs=inputs,
            files={name: hash_file(temporary / name) for name in files},
            facts={"draft": str(draft_folder.absolute()), "target": info.target.model_dump(mode="json")},
            seconds=time.monotonic() - started,
        )
        _swap(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def foreseen(
    draft_folder: Path,
    out: Path,
    settings: ExportSettings,
    target: TargetSettings | None = None,
    boundaries: Sequence[int] | None = None,
) -> JSON:
    """The `state` of `out`: complete, or new where this export would be written. Raises InputError as `export_draft`
    does."""
    inputs = {"draft": draft_folder} if is_complete(draft_folder) else {}
    _check_free(out)
    if exported_before(out, settings.model_dump(mode="json"), inputs) is not None:
        return {"state": "complete"}
    draft, info = load_draft(draft_folder, foreign=named(draft_folder, target), boundaries=boundaries)
    export_config(draft, info.model_dump(mode="json"), settings)
    return {"state": "new"}


def named(draft_folder: Path, target: TargetSettings | None) -> NamedTarget | None:
    """The target of a draft made elsewhere; None for one of ours, which knows its own."""
    if target is None or has_info(draft_folder):
        return None
    return name_target(target.name, target.trust_remote_code)


def refusals(config: DraftConfig, engines: Iterable[str]) -> list[str]:
    """Why these engines (`sglang`, `vllm@0.24`, ...) could not serve a draft of this config as it is. No weights."""
    readers = [parse_engine(name) for name in engines]
    reasons = [
        f"{reader}: {reason}"
        for reader in readers
        for reason in (*CANNOT[reader.name](config, reader), *_widths(config), *_tap_refusal(config, reader))
    ]
    return reasons or _release_refusals(config, readers)


def _widths(config: DraftConfig) -> list[str]:
    if config.target_hidden_size == config.hidden_size or config.own_embedding:
        return []
    return [f"hidden_size {config.hidden_size}: the target's embedding is {config.target_hidden_size} wide"]


def _tap_refusal(config: DraftConfig, reader: Engine) -> list[str]:
    try:
        ids_for(reader, config.boundaries, config.target_model_type, config.target_num_hidden_layers)
    except InputError as error:
        return [f"taps {list(config.boundaries)} of a {config.target_model_type} target: {error.got}"]
    return []


def _release_refusals(config: DraftConfig, readers: Sequence[Engine]) -> list[str]:
    """Releases that read the same key by different rules and would not all capture the taps."""
    keys = TapKeys.of(tap_keys(config, readers, strict=True))
    reasons = []
    for reader in readers:
        found = captures(reader, keys, config.target_model_type, config.target_num_hidden_layers)
        if found.boundaries != config.boundaries:
            reasons.append(f"{reader}: from the list that the others need it captures {found.boundaries}")
    return reasons


def check_exportable(config: DraftConfig, settings: ExportSettings) -> None:
    """Raise InputError naming everything that an engine asked for cannot represent; call it before training too."""
    reasons = refusals(config, settings.engines)
    if reasons:
        able = [name for name in CANNOT if not refusals(config, [name])]
        raise InputError(
            wanted=f"a draft that {' and '.join(settings.engines)} can serve as it was trained",
            got="; ".join(reasons),
            where="export",
            next=f"--set export.engines={able}" if able else "train again without these options",
        )


def export_config(draft: Draft, eyas: JSON, settings: ExportSettings) -> JSON:
    """config.json for the engines asked for. Raises InputError as `check_exportable` does."""
    check_exportable(draft.config, settings)
    engines = [parse_engine(name) for name in settings.engines]
    dtype = str(draft.fc.weight.dtype).removeprefix("torch.")
    return to_json(draft.config, eyas, dtype=dtype, engines=engines, strict=True)


def exported_tensors(draft: Draft) -> JSON:
    """Tensors under the names engines read; a tensor stored under two names is stored twice."""
    tensors = draft_tensors(draft)
    return {
        name: tensors[canonical].detach().cpu().clone().contiguous()
        for name, canonical in exported_names(draft.config).items()
    }


def _check_free(out: Path) -> None:
    """Refuse to put an export over anything but an earlier export."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not is_complete(out)):
        raise InputError(
            wanted="an output folder that is new, empty or an earlier export",
            got="something else",
            where=str(out),
            next="give another --out",
        )
    if is_complete(out):
        read_manifest(out, "export")


def exported_before(out: Path, settings: JSON, inputs: dict[str, Path]) -> Manifest | None:
    """The manifest of an export of this same finished draft under these settings; any other is made anew."""
    if not inputs or not is_complete(out):
        return None
    manifest = read_manifest(out, "export")
    same = json.loads(json.dumps(settings)) == manifest.settings
    hashes = {name: manifest_hash(path) for name, path in inputs.items() if is_complete(path)}
    return manifest if same and hashes == manifest.inputs else None


def _sibling(out: Path) -> Path:
    """A hidden empty folder beside `out`, on the same disk, so that the swap is a rename."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise disk_error(out, error) from error
    temporary.chmod(0o755)
    return temporary


def _swap(temporary: Path, out: Path) -> None:
    """Put the finished folder in place of `out`; an earlier export is moved aside first and removed last."""
    old = temporary.with_name(f"{temporary.name}.old")
    try:
        if out.exists():
            out.replace(old)
        temporary.replace(out)
    except OSError as error:
        raise disk_error(out, error) from error
    shutil.rmtree(old, ignore_errors=True)
