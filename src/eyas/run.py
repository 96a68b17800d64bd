"""A stage's folder and its manifest.

A stage reads folders and writes one. `manifest.json` is written last and atomically: it exists, so the stage is
complete. It carries `format`, the stage, the resolved settings, the hash of each input's manifest, the checksum of
each data file, facts the stage wants remembered (target identity, template hash, counts), versions, machine, command.
A later stage compares before it reads: a stale or foreign input stops it with the field's name.
"""

import errno
import hashlib
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

from eyas.errors import InputError

FORMAT = 1
MANIFEST = "manifest.json"
JSON = dict[str, Any]


class Manifest(BaseModel):
    """What a complete stage folder says of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    stage: str
    """prompts, responses, captures, draft, evaluate, export, check, bench."""
    settings: JSON
    """The stage's settings with every default spelt out."""
    inputs: dict[str, str]
    """Input name to the sha256 of that input's manifest."""
    files: dict[str, str]
    """Data file (relative to the folder) to its sha256."""
    facts: JSON
    """What the stage learned: target identity, tokenizer and template hashes, counts."""
    versions: dict[str, str]
    machine: JSON
    command: list[str]
    created: str
    """UTC, ISO 8601."""
    seconds: float
    """Wall time of the stage, over all its resumptions where it knows them."""


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_json(value: Any) -> str:
    """sha256 of the canonical JSON text of `value`."""
    return hash_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def hash_file(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write by temporary file, fsync and rename: a reader sees the old file or the whole new one.

    Raises InputError when the disk is full; what was there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> InputError:
    """An OSError while writing `path`, as an error with its next step."""
    misplaced = isinstance(error, (FileExistsError, NotADirectoryError, FileNotFoundError, PermissionError))
    return InputError(
        wanted=f"to write {path}",
        got=error.strerror or str(error),
        where=str(path),
        next="give an --out that is a folder, or none yet, where you may write"
        if misplaced or error.errno == errno.EROFS
        else "free some space or give --out on another disk, then run the same command again: it resumes",
    )


def is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path, stage: str | None = None) -> Manifest:
    """The manifest of a complete stage folder.

    Raises InputError where the folder has none, it is unreadable, of a newer format, or of another stage.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(
            wanted=f"a complete {stage or 'stage'} folder (one with {MANIFEST})",
            got="no such folder" if not folder.is_dir() else "an unfinished folder, or one that is not Eyas's",
            where=str(folder),
            next="run the stage that writes it again (it resumes), or give another path",
        )
    try:
        raw = json.loads(path.read_text())
        written = raw.get("format") if isinstance(raw, dict) else None
        newer = isinstance(written, int) and written > FORMAT
        manifest = None if newer else Manifest.model_validate(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(
            wanted="a manifest of format 1",
            got=" ".join(str(error).split())[:300],
            where=str(path),
            next="make the stage again",
        ) from error
    if manifest is None:
        raise InputError(
            wanted=f"a manifest of format {FORMAT} or older",
            got=f"format {written}",
            where=str(path),
            next="pip install --upgrade eyas",
        )
    if stage is not None and manifest.stage != stage:
        raise InputError(
            wanted=f"{_article(stage)} {stage} folder",
            got=f"{_article(manifest.stage)} {manifest.stage} folder",
            where=str(path),
            next=f"give the {stage} folder",
        )
    return manifest


def _article(word: str) -> str:
    return "an" if word[:1] in "aeiou" else "a"


def manifest_hash(folder: Path) -> str:
    """What a later stage records of this input: the sha256 of its manifest, which holds its data's checksums."""
    read_manifest(folder)
    return hash_file(folder / MANIFEST)


def write_manifest(
    folder: Path,
    stage: str,
    *,
    settings: JSON,
    inputs: dict[str, Path],
    files: dict[str, str],
    facts: JSON,
    seconds: float,
) -> Manifest:
    """Declare `folder` complete. `files` maps relative names to sha256 (see hash_file)."""
    manifest = Manifest(
        format=FORMAT,
        stage=stage,
        settings=settings,
        inputs={name: manifest_hash(path) for name, path in inputs.items()},
        files=files,
        facts=facts,
        versions=versions(),
        machine=machine(),
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seconds=round(seconds, 3),
    )
    write_atomic(folder / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
    return manifest


def check_same(name: str, wanted: Any, got: Any, where: Path, next: str, code: str | None = None) -> None:
    """Stop with the field's name where an input was made under another value."""
    if wanted != got:
        got = f"{name} = {got!r}"
        raise InputError(wanted=f"{name} = {wanted!r}", got=got, where=str(where), next=next, code=code)


def verify_files(folder: Path) -> list[str]:
    """Names of data files that are missing or whose bytes differ from the manifest."""
    manifest = read_manifest(folder)
    return [
        name
        for name, checksum in manifest.files.items()
        if not (folder / name).is_file() or hash_file(folder / name) != checksum
    ]


def cache_folder() -> Path:
    """`$EYAS_CACHE`, else `eyas` in the user's cache folder."""
    if os.environ.get("EYAS_CACHE"):
        return Path(os.environ["EYAS_CACHE"]).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return (Path(base) if base else Path.home() / ".cache") / "eyas"


def versions() -> dict[str, str]:
    """Versions of Python, Eyas and what its figures depend on, where installed."""
    found = {"python": platform.python_version()}
    for package in ("eyas", "torch", "transformers", "safetensors", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> JSON:
    """The hardware a figure was measured on."""
    return {
        "system": platform.system(),
        "processor": processor_name(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
