"""The reference: every boundary of the target over a probe, in float32, kept for comparison.

A target in memory is run as it is. A folder is loaded where it fits, and streamed from its shards where it does not,
or where it is stored quantised: the reference must run the same weights as the engine.

Shapes: T tokens, H hidden size, n layers.
"""

from pathlib import Path

import psutil
import torch
from torch import Tensor

from eyas.formats.headers import read_headers
from eyas.formats.quantization import read_quantization
from eyas.formats.target_config import read_config, text_config
from eyas.models.streaming.backbone import final_norm_of, stream_boundaries
from eyas.models.streaming.plan import BEYOND, float_bytes
from eyas.models.target import Target, load_target, record_boundaries, resolve_target

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
SHARE_OF_MEMORY = 0.5
"""A target is loaded whole where its float32 weights take less than this share of the free memory: loading holds the
stored weights beside them for a moment."""


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


def fits(folder: Path) -> bool:
    """Whether to load `folder` whole: plain floats, a tokenizer beside them, and small enough."""
    if not list(folder.glob("*.safetensors")):
        return True  # loading says what is wrong with it
    if read_quantization(folder).scheme != "none" or not any((folder / name).is_file() for name in TOKENIZERS):
        return False
    needed = sum(float_bytes(name, header) for name, header in read_headers(folder).items())
    return needed < SHARE_OF_MEMORY * psutil.virtual_memory().available


def open_reference(name: str, *, trust_remote_code: bool = False) -> Target | Path:
    """A target to compare with: loaded where it fits in memory, else its folder, to be streamed."""
    folder = resolve_target(name, trust_remote_code=trust_remote_code)
    return load_target(name, trust_remote_code=trust_remote_code) if fits(folder) else folder


def num_hidden_layers(target: Target | Path) -> int:
    """n: boundary n is the last, before the final norm."""
    if isinstance(target, Path):
        return text_config(read_config(target))["num_hidden_layers"]
    return target.num_hidden_layers
