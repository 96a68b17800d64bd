"""Checkpoints of training: `step-N/` with the draft, and beside it all that a bit-exact resume needs.

A step folder is written under another name and renamed: it exists, so it is whole. The newest two are kept, and the
best.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from eyas.errors import InputError
from eyas.models.checkpoint import CONFIG, DraftInfo, load_draft, save_draft, step_number
from eyas.models.draft import Draft
from eyas.run import disk_error, write_atomic
from eyas.training.optimise import Optimiser, trained

STATES, TRAINER = "trainer_state.safetensors", "trainer.json"
KEPT = 2


def save_step(
    out: Path,
    draft: Draft,
    info: DraftInfo,
    optimiser: Optimiser,
    step: int,
    tokens: int,
    keep: int | None = None,
) -> None:
    """Write `step-N/` whole or not at all, then drop older ones but step `keep`. Raises InputError on a full disk."""
    final = out / f"step-{step}"
    partial = out / f".step-{step}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        save_draft(partial, draft, info)
        write_atomic(partial / STATES, save(_optimiser_tensors(draft, optimiser)))
        write_atomic(partial / TRAINER, json.dumps({"step": step, "tokens": tokens}) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except OSError as error:
        raise disk_error(final, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for folder in step_folders(out)[:-KEPT]:
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


def restore(folder: Path, draft: Draft, optimiser: Optimiser) -> tuple[int, int]:
    """Put the optimiser's moments and the random state back; returns steps and tokens done.

    The draft's weights come from load_draft. Raises InputError for a checkpoint that is not whole.
    """
    path, cursor = folder / STATES, folder / TRAINER
    try:
        done = json.loads(cursor.read_text())
        step, tokens = int(done["step"]), int(done["tokens"])
    except (OSError, ValueError, KeyError) as error:
        raise _broken(str(cursor), str(error), folder) from error
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _broken(str(path), str(error), folder) from error
    if missing := sorted(_optimiser_names(draft, optimiser) - tensors.keys()):
        raise _broken(str(path), f"missing {', '.join(missing[:3])}", folder)
    torch.set_rng_state(tensors["rng"])
    for name, parameter in trained(draft).items():
        optimiser.owner(parameter).state[parameter] = {
            key: tensors[f"{key}.{name}"].to(parameter.device) for key in optimiser.kept(parameter)
        }
    return step, tokens


def _optimiser_tensors(draft: Draft, optimiser: Optimiser) -> dict[str, Tensor]:
    tensors = {
        f"{key}.{name}": value.detach().cpu().contiguous()
        for name, parameter in trained(draft).items()
        for key, value in optimiser.owner(parameter).state[parameter].items()
    }
    return tensors | {"rng": torch.get_rng_state()}


def _optimiser_names(draft: Draft, optimiser: Optimiser) -> set[str]:
    return {f"{key}.{name}" for name, parameter in trained(draft).items() for key in optimiser.kept(parameter)} | {
        "rng"
    }


def _broken(where: str, got: str, folder: Path) -> InputError:
    return InputError(
        wanted="a whole checkpoint",
        got=got,
        where=where,
        next=f"remove {folder} and run the same command again: it resumes from the one before",
    )
