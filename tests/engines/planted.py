"""Exports that are not what they should be, and drafts of every wiring: what a real engine is then asked to load."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.export.folder import export_draft
from eyas.formats.draft_config import DraftConfig
from eyas.formats.taps import IDS_KEY
from eyas.models.draft import Draft
from eyas.models.target import Target
from eyas.recipe import DraftSettings, ExportSettings
from eyas.training.initialise import draft_config
from wiring_lab import write_draft

JSON = dict[str, Any]
Change = Callable[[JSON, dict[str, Tensor]], None]
"""Touches the config and the tensors of an export in place."""


def planted(export: Path, folder: Path, change: Change) -> Path:
    """A copy of an export that `change` has touched."""
    shutil.copytree(export, folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    content, tensors = json.loads(config.read_text()), load_file(weights)
    change(content, tensors)
    config.write_text(json.dumps(content))
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def unchanged(config: JSON, tensors: dict[str, Tensor]) -> None:
    """Nothing planted in the export."""


def uneven(config: JSON, tensors: dict[str, Tensor]) -> None:
    """Norms far from one, as only a long training makes them: without that, losing one is less than a rounding."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.startswith("midlayer.") and tensor.dim() == 1:
            tensor.copy_(tensor * torch.empty(len(tensor)).uniform_(0.5, 1.5, generator=generator))


def both(*changes: Change) -> Change:
    def change(config: JSON, tensors: dict[str, Tensor]) -> None:
        for one in changes:
            one(config, tensors)

    return change


def ids(*layers: int) -> Change:
    """The list that vLLM reads."""

    def change(config: JSON, tensors: dict[str, Tensor]) -> None:
        config[IDS_KEY] = list(layers)

    return change


def nested_only(config: JSON, tensors: dict[str, Tensor]) -> None:
    """SGLang's list alone, as an export for SGLang has it: vLLM reads its numbers by its own rule."""
    del config[IDS_KEY]


def without(*names: str) -> Change:
    """Tensors lost on the way."""

    def change(config: JSON, tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def added(name: str) -> Change:
    """A tensor nobody asked for."""

    def change(config: JSON, tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors["norm.weight"].clone()

    return change


def setting(name: str, value: Any) -> Change:
    """A key that says another thing than the draft was trained with."""

    def change(config: JSON, tensors: dict[str, Tensor]) -> None:
        config[name] = value

    return change


def untrained(folder: Path, target: Target, **options: Any) -> Path:
    """An export for vLLM of a random draft wired by `options` (fields of DraftConfig); its norms are random too."""
    torch.manual_seed(0)
    base = draft_config(target, (2, 15, 27), DraftSettings(vocab_size=2048, fc_norm=False))
    draft = Draft(DraftConfig(**{**base.model_dump(), **options}))
    draft.d2t.copy_(torch.arange(draft.config.draft_vocab_size))  # draft id i is target id 2i
    draft.t2d[2 * torch.arange(draft.config.draft_vocab_size)] = True
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    draft.share_embedding(target.embedding)
    write_draft(folder / "draft", draft.eval(), target)
    export_draft(folder / "draft", folder / "export", ExportSettings(engines=("vllm",)))
    return folder / "export"
