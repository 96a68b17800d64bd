"""Checkpoints of training: `step-N/` with the draft, and beside it all that a resume needs.

`trainer_state/` is written and read by torch.distributed.checkpoint, as safetensors: one file a process, each with its
own shards, and any other number of processes reads them. A step folder is written under another name and renamed: it
exists, so it is whole. The newest two are kept, and the best.
"""

import json
import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from eyas.errors import InputError
from eyas.models.checkpoint import CONFIG, DraftInfo, draft_tensors, load_draft, save_draft
from eyas.models.draft import Draft
from eyas.run import disk_error, hash_file, write_atomic
from eyas.stage import step_number
from eyas.training.distributed import Ranks, is_lost
from eyas.training.optimise import Optimiser, trained
from eyas.training.shards import whole_tensor

STATES, TRAINER, SUMS = "trainer_state", "trainer.json", "sha256"
KEPT = 2


def save_step(
    out: Path,
    draft: Draft,
    info: DraftInfo,
    optimiser: Optimiser,
    step: int,
    tokens: int,
    keep: int | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Write `step-N/` whole or not at all, then drop older ones but step `keep`. Raises InputError on a full disk."""
    ranks = ranks or Ranks()
    final = out / f"step-{step}"
    partial = out / f".step-{step}.partial"
    try:
        tensors = {}
        for name, tensor in draft_tensors(draft).items():
            whole = whole_tensor(tensor)
            if ranks.leads:
                tensors[name] = whole.cpu()
        if ranks.leads:
            shutil.rmtree(partial, ignore_errors=True)
            save_draft(partial, draft, info, tensors)
            (partial / STATES).mkdir()
        ranks.wait()
        write_states(partial / STATES, optimiser_tensors(draft, optimiser), ranks)
        if ranks.leads:
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            sizes = {path.name: path.stat().st_size for path in files if path.parent.name == STATES}
            sums = {path.relative_to(partial).as_posix(): hash_file(path) for path in files}
            done = {"step": step, "tokens": tokens, STATES: sizes, SUMS: sums}
            write_atomic(partial / TRAINER, json.dumps(done) + "\n")
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
    except OSError as error:
        raise disk_error(final, error) from error
    finally:
        if ranks.leads:
            shutil.rmtree(partial, ignore_errors=True)
    for folder in step_folders(out)[:-KEPT] if ranks.leads else []:
        if step_number(folder) != keep:
            shutil.rmtree(folder, ignore_errors=True)


def step_folders(out: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted((path for path in out.glob("step-*") if (path / CONFIG).is_file()), key=step_number)


def load_checkpoint(folder: Path, target_embedding: Tensor) -> tuple[Draft, DraftInfo]:
    """The draft of a checkpoint. Raises InputError for one that is not whole, with what to remove."""
    try:
        return load_draft(folder, target_embedding)
    except InputError as error:
        raise _broken(error.where, error.got, folder) from error


def restore(folder: Path, draft: Draft, optimiser: Optimiser, ranks: Ranks | None = None) -> tuple[int, int]:
    """Put the optimiser's moments and the random state back; returns steps and tokens done.

    The draft's weights come from load_checkpoint. Raises InputError for a checkpoint that is not whole, or of which a
    file is not what its checksum says (there were none once).
    """
    ranks = ranks or Ranks()
    cursor = folder / TRAINER
    try:
        done = json.loads(cursor.read_text())
        step, tokens, sizes = int(done["step"]), int(done["tokens"]), dict(done.get(STATES, {}))
        sums = dict(done.get(SUMS, {}))
    except (OSError, ValueError, KeyError) as error:
        raise _broken(str(cursor), str(error), folder) from error
    for name, size in sizes.items():
        path = folder / STATES / name
        if not path.is_file() or path.stat().st_size != size:
            got = f"{path.stat().st_size} bytes of {size}" if path.is_file() else "no such file"
            raise _broken(str(path), got, folder)
    changed = [name for name, checksum in sums.items() if hash_file(folder / name) != checksum] if ranks.leads else []
    if changed := ranks.share(changed):
        raise _broken(str(folder / changed[0]), "other bytes than its checksum says", folder)
    for parameter in trained(draft).values():
        optimiser.owner(parameter).state[parameter] = {
            key: torch.zeros((), device=parameter.device) if key == "step" else torch.zeros_like(parameter)
            for key in optimiser.kept(parameter)
        }
    tensors = optimiser_tensors(draft, optimiser)
    # before there were several processes the states were one file beside the draft
    source = folder / STATES if sizes else folder
    try:
        read_states(source, tensors, ranks)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        if is_lost(error):
            raise
        raise _broken(str(source), str(error), folder) from error
    torch.set_rng_state(tensors["rng"])
    return step, tokens


def optimiser_tensors(draft: Draft, optimiser: Optimiser) -> dict[str, Tensor]:
    """What a resume needs beside the weights, by name; in shards where the draft is."""
    tensors = {
        f"{key}.{name}": value.detach()
        for name, parameter in trained(draft).items()
        for key, value in optimiser.owner(parameter).state[parameter].items()
    }
    unit = {} if optimiser.unit_A is None else {"unit.fc.weight": optimiser.unit_A}
    return tensors | unit | {"rng": torch.get_rng_state()}


def write_states(folder: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Raises what went wrong in the first process where something did."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _quietly():
        dcp.save(tensors, storage_writer=writer, no_dist=ranks.size == 1)


def read_states(folder: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Fill `tensors`, whole or this process's shards. Raises as `write_states` does."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with _quietly():
        dcp.load(tensors, storage_reader=reader, no_dist=ranks.size == 1)


@contextmanager
def _quietly() -> Generator[None]:
    """Without torch's warning that one process is one, and with the cause where it reports that it failed."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is ", category=UserWarning)
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _broken(where: str, got: str, folder: Path) -> InputError:
    return InputError(
        wanted="a whole checkpoint",
        got=got,
        where=where,
        next=f"remove {folder} and run the same command again: it resumes from the one before",
    )
