"""The streamed reference is the in-memory forward, bit for bit, whatever the architecture and however it is stored."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from checkpoints import BUILD, LAYERS, QUANTISATIONS, published, save_shards, tiny
from eyas.models.streaming.backbone import stream_boundaries

PROBE = [1, *range(5, 120, 3), *range(119, 60, -4)]
DENSE = ("llama", "qwen3")


def in_memory(model: PreTrainedModel, experts: str = "eager") -> list[Tensor]:
    """Every boundary by Hugging Face's own forward, the final norm taken out of it."""
    model.config._experts_implementation = experts
    norm, model.model.norm = model.model.norm, nn.Identity()
    with torch.inference_mode():
        hidden = model(torch.tensor([PROBE]), output_hidden_states=True, use_cache=False).hidden_states
    model.model.norm = norm
    return [state[0] for state in hidden]


@pytest.mark.parametrize("architecture", BUILD)
def test_streamed_is_in_memory_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    model = tiny(architecture)
    folder = save_shards(tmp_path / architecture, model.config.to_dict(), published(model))
    streamed, whole = stream_boundaries(folder, PROBE), in_memory(model)
    assert len(streamed) == LAYERS + 1
    for ours, theirs in zip(streamed, whole, strict=True):
        assert torch.equal(ours, theirs)


def load_published(model: PreTrainedModel, values: dict[str, Tensor]) -> PreTrainedModel:
    """`model` with `values`, which go by published names, folded into its stacked parameters."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in values.items():
        if name in state:
            state[name] = tensor
            continue
        stem, expert, part, _ = name.rsplit(".", 3)
        half = state[f"{stem}.gate_up_proj"].shape[1] // 2
        rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None), "down_proj": slice(None)}[part]
        state[f"{stem}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(expert)][rows] = tensor
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [("llama", "fp8"), ("qwen3_moe", "fp8"), ("deepseek_v3", "fp8"), ("deepseek_v3", "int4"), ("gpt_oss", "mxfp4")],
)
def test_a_quantised_checkpoint_streams_as_its_own_values(architecture: str, scheme: str, tmp_path: Path) -> None:
    quantise, declared = QUANTISATIONS[scheme]
    model = tiny(architecture)
    stored, values = quantise(published(model))
    config = model.config.to_dict() | {"quantization_config": declared}
    streamed = stream_boundaries(save_shards(tmp_path / "target", config, stored), PROBE)
    assert len(stored) > len(values)
    for ours, theirs in zip(streamed, in_memory(load_published(model, values)), strict=True):
        assert torch.equal(ours, theirs)
