"""The reference: every boundary of the target over a probe, in float32, kept for comparison.

A target in memory is run as it is. A folder is loaded where it fits, and streamed from its shards where it does not,
or where it is stored quantised: the reference must run the same weights as the engine.

Shapes: T tokens, H hidden size, n layers.
"""

from pathlib import Path

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.formats.target_config import read_config, text_config
from eyas.models.resolve import resolve_target
from eyas.models.streaming.backbone import final_norm_of, stream_boundaries
from eyas.models.streaming.plan import BEYOND, fits
from eyas.models.target import Target, load_target, record_boundaries


def reference_boundaries(
    target: Target | Path, ids: list[int], up_to: int | None = None, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Boundaries 0..min(n, up_to + 2) over `ids`, all n + 1 without `up_to`: float32 tensors [T, H] on the CPU.

    The last of them, boundary n, is before the final norm. Raises InputError for a folder that cannot be read.
    """
    if isinstance(target, Path):
        if not fits(target):
            return stream_boundaries(target, ids, up_to, device=device)
        target = load_target(str(target))
    return boundaries_in_memory(target, ids, up_to)


@torch.inference_mode()
def boundaries_in_memory(target: Target, ids: list[int], up_to: int | None = None) -> list[Tensor]:
    """`reference_boundaries` of a loaded target."""
    assert up_to is None or up_to >= 0, f"boundary {up_to}"
    last = target.num_hidden_layers if up_to is None else min(target.num_hidden_layers, up_to + BEYOND)
    wanted = range(last + 1)
    with record_boundaries(target, tuple(wanted)) as recorder:
        target.backbone(input_ids=torch.tensor([ids], device=target.embedding.device), use_cache=False)
        return [recorder.states[boundary][0].float().cpu() for boundary in wanted]


@torch.inference_mode()
def final_normed(target: Target | Path, boundary_n_TH: Tensor) -> Tensor:
    """The last boundary through the target's own final norm: what Hugging Face calls `hidden_states[n]` [T, H]."""
    if isinstance(target, Path):
        return final_norm_of(target)(boundary_n_TH.float())
    return target.final_norm(boundary_n_TH.to(target.dtype)).float()


def checked_device(name: str) -> str:
    """`cpu`, `cuda`, `cuda:1` ... Raises InputError for a device that this machine's torch does not have."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            wanted="a device of this machine's torch: cpu, or cuda where there is a GPU",
            got=f"{name!r}: {str(error).splitlines()[0]}",
            where="--device",
            next="--device cpu",
        ) from error
    return name


def open_reference(name: str, *, trust_remote_code: bool = False) -> Target | Path:
    """A target to compare with: loaded where it fits in memory, else its folder, to be streamed."""
    folder = resolve_target(name, trust_remote_code=trust_remote_code)
    return load_target(name, trust_remote_code=trust_remote_code) if fits(folder) else folder


def num_hidden_layers(target: Target | Path) -> int:
    """n: boundary n is the last, before the final norm."""
    if isinstance(target, Path):
        return text_config(read_config(target))["num_hidden_layers"]
    return target.num_hidden_layers
