"""Begin, resume or skip a stage folder: one rule for all stages.

An unfinished folder holds `progress.json`: the settings and inputs it was begun under, what was decided at the start
(precision), and the seconds spent so far. It is compared before anything is resumed, and removed after the manifest.
"""

import errno
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eyas.errors import InputError
from eyas.lock import FolderLock, lock_folder
from eyas.progress import say
from eyas.run import (
    JSON,
    Manifest,
    check_same,
    disk_error,
    hash_file,
    is_complete,
    manifest_hash,
    read_manifest,
    write_atomic,
    write_manifest,
)

PROGRESS = "progress.json"
RESULT = "result.json"
Standing = Literal["new", "unfinished", "complete"]
"""How far a stage's folder is: `unfinished` is gone on from by the same command, `complete` is skipped."""
METRICS, HELD_OUT = "metrics.jsonl", "heldout_accept_length"
"""A training run's lines, one an optimiser step, and their key of the accept length measured there."""


@dataclass
class Stage:
    """A stage folder at work: `complete` is its manifest where nothing is left to do."""

    folder: Path
    name: str
    settings: JSON
    inputs: dict[str, Path]
    complete: Manifest | None = None
    decided: JSON = field(default_factory=dict)
    seconds_before: float = 0.0
    started: float = field(default_factory=time.monotonic)
    lock: FolderLock | None = None
    """Held while the stage is at work."""

    @property
    def seconds(self) -> float:
        """Wall time over all resumptions, as far as it was saved."""
        return self.seconds_before + time.monotonic() - self.started

    def save(self, **decided: Any) -> None:
        """Write progress.json; `decided` adds to what later resumptions must keep to."""
        self.decided.update(decided)
        hashes = {name: manifest_hash(path) for name, path in self.inputs.items()}
        state = {
            "stage": self.name,
            "settings": self.settings,
            "inputs": hashes,
            "decided": self.decided,
            "seconds": self.seconds,
        }
        write_atomic(self.folder / PROGRESS, json.dumps(state) + "\n")

    def finish(self, *, files: dict[str, str], facts: JSON) -> Manifest:
        """Declare the folder complete."""
        manifest = write_manifest(
            self.folder,
            self.name,
            settings=self.settings,
            inputs=self.inputs,
            files=files,
            facts=facts,
            seconds=self.seconds,
        )
        (self.folder / PROGRESS).unlink(missing_ok=True)
        if self.lock is not None:
            self.lock.release()
        return manifest


def completed(folder: Path, name: str, settings: JSON, inputs: dict[str, Path]) -> Manifest | None:
    """The manifest of a folder complete under these settings and inputs, and said so; None where the stage is still to
    do.

    Raises InputError naming the field where it was made under other ones.
    """
    manifest = _completed(folder, name, settings, inputs)
    if manifest is not None:
        say_complete(folder, name)
    return manifest


def say_complete(folder: Path, name: str) -> None:
    say(f"{name}: {folder} is complete under these settings, nothing is left to do")


def _completed(folder: Path, name: str, settings: JSON, inputs: dict[str, Path]) -> Manifest | None:
    if not is_complete(folder):
        return None
    manifest = read_manifest(folder)
    _own(folder, name, manifest.stage, "a")
    _compare(Stage(folder, name, json.loads(json.dumps(settings)), inputs), manifest.settings, manifest.inputs)
    return manifest


def standing(folder: Path, name: str, settings: JSON, inputs: dict[str, Path]) -> Standing:
    """How far the stage `name` is in `folder`; nothing is written.

    Raises InputError where `begin` would: other settings, other inputs. Inputs that are not complete yet are not
    compared.
    """
    if folder.exists() and not folder.is_dir():
        raise disk_error(folder, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
    there = {key: path for key, path in inputs.items() if is_complete(path)}
    if _completed(folder, name, settings, there) is not None:
        return "complete"
    if not folder.is_dir():
        return "new"
    return "new" if _begun(Stage(folder, name, json.loads(json.dumps(settings)), there)) is None else "unfinished"


def begin(folder: Path, name: str, settings: JSON, inputs: dict[str, Path]) -> Stage:
    """Open `folder` for the stage `name`: new, resumed, or complete.

    Raises InputError naming the field where it was begun under other settings or from other inputs, and naming the
    process where another one is at work in it.
    """
    stage = Stage(folder, name, json.loads(json.dumps(settings)), inputs, completed(folder, name, settings, inputs))
    if stage.complete is not None:
        return stage
    stage.lock = locked(folder)
    stage.complete = completed(folder, name, settings, inputs)  # another process may have ended meanwhile
    if stage.complete is not None:
        return stage
    if (state := _begun(stage)) is not None:
        stage.decided, stage.seconds_before = state["decided"], state["seconds"]
    else:
        stage.save()
    return stage


def _begun(stage: Stage) -> JSON | None:
    """What `progress.json` says of a stage that made something already; None where there is nothing to go on from.

    Raises InputError where it was begun under other settings or from other inputs, or cannot be read.
    """
    path = stage.folder / PROGRESS
    if not path.is_file() or not _has_data(stage.folder):
        return None
    try:
        state = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(
            wanted="a readable progress.json",
            got=str(error),
            where=str(path),
            next=f"remove {stage.folder} and run again",
        ) from error
    _own(stage.folder, stage.name, state.get("stage", stage.name), "an unfinished")
    _compare(stage, state["settings"], state["inputs"])
    return state


def _own(folder: Path, name: str, written: str, how_far: str) -> None:
    """Raise InputError where a folder to write is another stage's."""
    if written != name:
        raise InputError(
            wanted=f"a new folder, or one of {name}, to write",
            got=f"{how_far} folder of another stage: {written}",
            where=str(folder),
            next="give another --out",
        )


def locked(folder: Path) -> FolderLock | None:
    try:
        return lock_folder(folder)
    except OSError as error:
        raise disk_error(folder, error) from error


def result_stage(
    folder: Path, name: str, *, settings: JSON, inputs: dict[str, Path], compute: Callable[[], JSON]
) -> tuple[JSON, bool]:
    """A stage whose product is one JSON object, `result.json`: (result, whether it was read back).

    Nothing of it can be resumed, so nothing is written before it is whole.
    """
    if (manifest := completed(folder, name, settings, inputs)) is not None:
        return json.loads(check_file(folder, RESULT, manifest).read_text()), True
    stage = Stage(folder, name, settings, inputs)
    result = compute()
    write_atomic(folder / RESULT, json.dumps(result, indent=1) + "\n")
    stage.finish(files={RESULT: hash_file(folder / RESULT)}, facts={})
    return result, False


def _has_data(folder: Path) -> bool:
    """Whether anything was made yet. Where a first run failed at once (a wrong setting), mending it is no conflict."""
    files = (file for file in folder.iterdir() if file.name != PROGRESS and not file.name.startswith("."))
    return any(file.stat().st_size > 0 for file in files)


def _compare(stage: Stage, settings: JSON, inputs: dict[str, str]) -> None:
    advice = f"give another --out, or remove {stage.folder} to make it anew"
    ours, theirs = flat(stage.settings), flat(settings)
    for key in sorted(ours.keys() | theirs.keys()):
        name = key if "." in key else f"{stage.name}.{key}"  # draft.block is its recipe's name already
        check_same(name, ours.get(key), theirs.get(key), stage.folder, advice)
    for name, path in stage.inputs.items():
        if (ours := manifest_hash(path)) != inputs.get(name):
            raise InputError(
                wanted=f"the {name} it is made from = {path.absolute()}, manifest {ours[:12]}...",
                got=f"the {name} it is made from = others, or older ones: manifest {inputs.get(name, 'none')[:12]}...",
                where=str(stage.folder),
                next=f"give the {name} it was made from, or {advice}",
            )


def flat(settings: JSON, prefix: str = "") -> JSON:
    found: JSON = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = value
    return found


def check_file(folder: Path, name: str, manifest: Manifest) -> Path:
    """A data file of a complete stage, its bytes compared with the manifest's checksum.

    Raises InputError where it is missing, cut or changed.
    """
    path = folder / name
    if not path.is_file() or hash_file(path) != manifest.files.get(name):
        raise InputError(
            wanted=f"{name} as the manifest describes it",
            got="no such file" if not path.is_file() else f"other bytes ({path.stat().st_size} of them)",
            where=str(path),
            next=f"remove {folder} and run its stage ({manifest.stage}) again",
        )
    return path


def chosen_step(folder: Path) -> Path:
    """`folder` itself where it is a draft; of a training run's folder the step that its manifest hands on, and while it
    is unfinished what it would hand on now: the step measured best, its newest `step-N` where none is measured."""
    if (folder / "config.json").is_file():
        return folder
    named = read_manifest(folder).facts.get("draft") if is_complete(folder) else None
    if named is not None:
        return folder / named
    steps = [path for path in folder.glob("step-*") if (path / "config.json").is_file()]
    lines = metric_lines(folder / METRICS) if len(steps) > 1 else []
    measured = {line["step"]: line[HELD_OUT] for line in lines if HELD_OUT in line}
    return max(steps, key=lambda path: (measured.get(step_number(path), 0.0), step_number(path)), default=folder)


def metric_lines(path: Path, step: float = math.inf) -> list[JSON]:
    """A training run's lines of steps up to `step`, each step's once, without a last one that cannot be read: a kill
    cut it. Raises InputError for any other that cannot be read."""
    found: dict[int, JSON] = {}
    texts = path.read_bytes().splitlines() if path.is_file() else []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            at = int(line["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):
                break
            raise InputError(
                wanted="one object of JSON a line, with its step",
                got=f"{type(error).__name__}: {error}",
                where=f"{path}, line {number}",
                next="remove that line and run the same command again: it goes on without that step's figures",
            ) from error
        if at <= step:
            found[at] = line
    return [found[at] for at in sorted(found)]


def step_number(folder: Path) -> int:
    """N of `step-N`."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1
