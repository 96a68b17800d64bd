"""A decoder of transformers' own modules on the meta device, each layer filled from the checkpoint as it is reached.

The decoder's own forward runs, so masks, rotary tables and the order of operations are transformers', not ours. Layers
above the last one wanted are dropped unread; of the embedding only the rows of the probe are read.

Shapes: T tokens, H hidden size, n layers.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from eyas.errors import Unsupported
from eyas.formats.target_config import layer_prefix, read_config, text_config
from eyas.models.experts import StreamedExperts, one_expert
from eyas.models.streaming.plan import BEYOND, EXPERT_GROUP
from eyas.models.streaming.weights import Checkpoint
from eyas.progress import Progress

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Model types whose checkpoint names are their modules' names, but for the experts."""
PER_EXPERT = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A stacked parameter to the per-expert tensors that published checkpoints hold, stacked along the outputs."""


@dataclass(frozen=True)
class Streamed:
    """A checkpoint with its decoder on the meta device. `prefix` stands before `layers.0.` in the tensor names."""

    checkpoint: Checkpoint
    config: PreTrainedConfig
    decoder: Any
    """A PreTrainedModel with `layers`, `norm` and `rotary_emb`, as every family in ARCHITECTURES has."""
    prefix: str


def open_streamed(folder: Path) -> Streamed:
    """Read config and headers only. Raises InputError for an architecture or a quantisation that is not supported."""
    checkpoint = Checkpoint.open(folder)
    config = streamed_config(folder)
    with torch.device("meta"):
        decoder: Any = AutoModel.from_config(config, dtype=torch.float32)
    decoder.eval().requires_grad_(False)
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config)  # its tables are computed, not stored
    return Streamed(checkpoint, config, decoder, layer_prefix(checkpoint.headers, folder))


def streamed_config(folder: Path) -> PreTrainedConfig:
    """The language model's config through transformers' own class; no remote code."""
    text = text_config(read_config(folder))
    if text["model_type"] not in ARCHITECTURES:
        raise Unsupported(
            wanted=f"a target of {', '.join(ARCHITECTURES)} (kimi_k2 and kimi_k25 read as deepseek_v3)",
            got=f"model_type {text['model_type']!r}",
            where=str(folder / "config.json"),
            next="give a machine with the memory to load it whole, or report this architecture",
        )
    return CONFIG_MAPPING[text["model_type"]].from_dict(text)


@torch.inference_mode()
def stream_boundaries(
    folder: Path, ids: list[int], up_to: int | None = None, *, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Boundaries 0..min(n, up_to + 2) of the checkpoint in `folder` over `ids`: float32 [T, H] on the CPU.

    Memory: one layer's attention and shared parts, one group of experts, and the boundaries kept (`plan`).
    """
    streamed = open_streamed(folder)
    n = streamed.config.num_hidden_layers
    last = n if up_to is None else min(n, up_to + BEYOND)
    decoder, states = streamed.decoder, list[Tensor]()
    layers = decoder.layers[:last]
    decoder.layers, decoder.norm = layers, nn.Identity()
    decoder.rotary_emb.to(device)
    with Progress("reference", total=last, unit="layers") as bar:
        prepare_layers(streamed, device, states, bar)
        embedded_1TH = embed(streamed, ids).to(device)[None]
        output = decoder(inputs_embeds=embedded_1TH, use_cache=False).last_hidden_state
    return [*states, output[0].cpu()]


def final_norm_of(folder: Path) -> nn.Module:
    """The target's final norm with its weights: boundary n to what Hugging Face calls `hidden_states[n]`."""
    streamed = open_streamed(folder)
    fill_module(streamed.decoder.norm, streamed.checkpoint, f"{streamed.prefix}norm.", "cpu")
    return streamed.decoder.norm


def embed(streamed: Streamed, ids: list[int]) -> Tensor:
    """Boundary 0 [T, H]: the embedding's rows for `ids`, each read once."""
    name = f"{streamed.prefix}embed_tokens.weight"
    rows = {token: streamed.checkpoint.row(name, token) for token in sorted(set(ids))}
    return torch.stack([rows[token] for token in ids])


def prepare_layers(streamed: Streamed, device: torch.device | str, states: list[Tensor], bar: Progress) -> None:
    """Hook every layer: its input is kept, its weights come before its forward and go after it."""
    checkpoint, one = streamed.checkpoint, cast(nn.Module | None, None)

    def fill(stem: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        states.append(args[0][0].cpu())
        fill_module(layer, checkpoint, stem, device)

    def drop(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        layer.to("meta")
        bar.advance(1)

    for index, layer in enumerate(streamed.decoder.layers):
        stem = f"{streamed.prefix}layers.{index}."
        experts = getattr(layer.mlp, "experts", None)  # dense layers have none
        if experts is not None:
            one = one or one_expert(experts)
            shapes = {name: tuple(slot.shape[1:]) for name, slot in one.named_parameters()}
            load = partial(load_expert, checkpoint, f"{stem}mlp.experts.", shapes)
            layer.mlp.experts = StreamedExperts(one, load, EXPERT_GROUP)
        layer.register_forward_pre_hook(partial(fill, stem))
        layer.register_forward_hook(drop)


def fill_module(module: nn.Module, checkpoint: Checkpoint, stem: str, device: torch.device | str) -> None:
    """Give `module` its own tensors, in float32 on `device`."""
    state: dict[str, Tensor] = {}
    for name, slot in module.state_dict().items():
        tensor = checkpoint.load(f"{stem}{name}")
        if tensor.shape != slot.shape:
            raise checkpoint.misshapen(f"{stem}{name}", tuple(slot.shape), tuple(tensor.shape))
        state[name] = tensor.to(device)
    module.load_state_dict(state, strict=True, assign=True)


def load_expert(
    checkpoint: Checkpoint, stem: str, shapes: dict[str, tuple[int, ...]], expert: int
) -> dict[str, Tensor]:
    """Parameters of one expert by name, [1, *shape], from a stack's row or from tensors of its own."""
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if f"{stem}{name}" in checkpoint or name not in PER_EXPERT:
            tensor = checkpoint.row(f"{stem}{name}", expert)
        else:
            tensor = torch.cat([checkpoint.load(f"{stem}{expert}.{part}.weight") for part in PER_EXPERT[name]])
        if tuple(tensor.shape) != shape:
            raise checkpoint.misshapen(f"{stem}{expert}.{name}", shape, tuple(tensor.shape))
        state[name] = tensor[None]
    return state
