"""States stored in fp8 with a scale a token come out of every reader as what was put in, to e4m3's precision."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.data.foreign import read_dumps
from eyas.data.shards import CaptureReader
from eyas.errors import InputError
from eyas.models.dequantise import from_fp8_rows
from made_captures import made
from wiring_lab import fp8_shard, rewrite_shard

T, H = 9, 4
IDS = torch.arange(20, 20 + T)
STATES = (torch.arange(3.0 * T * H).reshape(T, 3, H) + 1) * torch.tensor([1.0, 1000.0, 0.001])[None, :, None]
E4M3 = 1 / 16
"""Half a step of three bits of mantissa, relative."""


def coded(states: Tensor) -> tuple[Tensor, Tensor]:
    scale = states.abs().amax(dim=-1) / 448
    return (states / scale[..., None]).to(torch.float8_e4m3fn), scale


def near(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == torch.float32 and bool(((ours - theirs).norm(dim=-1) <= E4M3 * theirs.norm(dim=-1)).all())


def test_scales_are_each_row_s_or_each_block_s() -> None:
    codes = torch.tensor([[1.0, 2.0, 4.0, -8.0], [0.5, 1.0, 1.0, 2.0]]).to(torch.float8_e4m3fn)
    one, two = torch.tensor([2.0, 10.0]), torch.tensor([[2.0, 1.0], [10.0, 0.5]])
    assert from_fp8_rows(codes, one).tolist() == [[2.0, 4.0, 8.0, -16.0], [5.0, 10.0, 10.0, 20.0]]
    assert from_fp8_rows(codes, one[:, None]).tolist() == from_fp8_rows(codes, one).tolist()
    assert from_fp8_rows(codes, two).tolist() == [[2.0, 4.0, 4.0, -8.0], [5.0, 10.0, 0.5, 1.0]]
    assert from_fp8_rows(codes, None).tolist() == [[1.0, 2.0, 4.0, -8.0], [0.5, 1.0, 1.0, 2.0]]


def test_captures_are_read_with_their_scales(tiny_target: Path, tmp_path: Path) -> None:
    folder, target = made(tmp_path / "captures", tiny_target, train=2, heldout=2)
    plain = CaptureReader(folder).read(1)
    rewrite_shard(folder, lambda tensors: fp8_shard(tensors, 3))
    ours = CaptureReader(folder).read(1)
    width = target.hidden_size
    for block in range(3):
        columns = slice(block * width, (block + 1) * width)
        assert near(ours.taps_TA[:, columns], plain.taps_TA[:, columns])
    assert near(ours.last_hidden_TH, plain.last_hidden_TH)
    rewrite_shard(folder, lambda tensors: tensors | {"taps_scale": tensors["taps_scale"][:-1]})
    with pytest.raises(InputError, match="taps_scale of another length"):
        CaptureReader(folder)


def test_connector_files_are_read_with_their_scales(tmp_path: Path) -> None:
    codes, scale = coded(STATES)
    path = tmp_path / "one.safetensors"
    save_file({"hidden_states": codes, "hidden_states_scale": scale, "token_ids": IDS}, path)
    (dump,) = read_dumps(path)
    assert all(near(block, STATES[:, index]) for index, block in enumerate(dump.blocks(H)))
    save_file({"hidden_states": codes, "hidden_states_scale": scale.flatten()[:-1].clone(), "token_ids": IDS}, path)
    with pytest.raises(InputError, match="scales of shape"):
        read_dumps(path)


def test_per_sample_files_are_read_with_their_scales(tmp_path: Path) -> None:
    for index in range(3):
        codes, scale = coded(STATES[:, index])
        name = "final" if index == 2 else f"aux_{index}"
        torch.save(codes, tmp_path / f"{name}.pt")
        torch.save(scale, tmp_path / f"{name}_scale.pt")
    torch.save(IDS, tmp_path / "input_ids.pt")
    (dump,) = read_dumps(tmp_path)
    assert dump.count == 2
    assert near(dump.taps_TA[:, :H], STATES[:, 0])
    assert near(dump.taps_TA[:, H:], STATES[:, 1])
    assert dump.last_hidden_TH is not None
    assert near(dump.last_hidden_TH, STATES[:, 2])
