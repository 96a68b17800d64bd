"""Each published quantisation is undone to the value computed by hand, and to what transformers' own helper gives."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from eyas.errors import InputError
from eyas.formats.quantization import Quantization, quantization_of, read_quantization
from eyas.formats.target_config import text_config
from eyas.models.dequantise import E2M1, from_fp8_blocks, from_mxfp4, from_packed_int4


def test_fp8_blocks_by_hand_with_the_last_blocks_cut_short() -> None:
    weight = torch.tensor([[1.0, 2.0, -3.0], [0.5, 448.0, 8.0], [-16.0, 0.25, 1.5]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0, 10.0], [0.5, -1.0]])
    expected = [[2.0, 4.0, -30.0], [1.0, 896.0, 80.0], [-8.0, 0.125, -1.5]]
    assert from_fp8_blocks(weight, scale, (2, 2)).tolist() == expected


def test_mxfp4_by_hand_low_nibble_first() -> None:
    # 0x2B: low nibble 0xB = -1.5, high 0x2 = 1.0; 0x71: low 0x1 = 0.5, high 0x7 = 6.0
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 1, 15] = 0x2B, 0x71
    scales = torch.tensor([[128, 125]], dtype=torch.uint8)
    row = from_mxfp4(blocks, scales)[0].tolist()
    assert row[:2] == [-3.0, 2.0]
    assert row[62:] == [0.125, 1.5]
    assert row[2:62] == [0.0] * 60


def test_packed_int4_by_hand() -> None:
    # columns 0..7 hold -8 -7 0 1 2 3 4 7: stored plus 8 as 0 1 8 9 10 11 12 15, column 0 in the lowest bits
    first = int.from_bytes(bytes([0x10, 0x98, 0xBA, 0xFC]), "little", signed=True)
    packed = torch.tensor([[first, 0x0000_0009]], dtype=torch.int32)
    scale = torch.tensor([[0.5, 2.0, 64.0]], dtype=torch.bfloat16)
    expected = [[-4.0, -3.5, 0.0, 0.5, 4.0, 6.0, 8.0, 14.0, 64.0]]
    assert from_packed_int4(packed, scale, (1, 9), 4).tolist() == expected


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_mxfp4_is_what_transformers_unpacks(rows: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (2, rows, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (2, rows, groups), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, columns, rows]
    assert torch.equal(from_mxfp4(blocks, scales).transpose(1, 2), theirs)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_fp8_blocks_are_what_transformers_undoes(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows * 4, columns * 8, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(rows, columns, generator=generator)
    theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, scale, torch.float32)
    assert torch.equal(from_fp8_blocks(weight, scale, (4, 8)), theirs)


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 2**31))
def test_packed_int4_round_trips_through_a_packer_written_bit_by_bit(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (rows, columns), generator=generator)
    scale = torch.rand(rows, -(-columns // 32), generator=generator)
    words = [
        [sum((row[c] + 8) << 4 * (c % 8) for c in range(w, min(w + 8, columns))) for w in range(0, columns, 8)]
        for row in values.tolist()
    ]
    packed = torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in words]).int()
    scales = scale.repeat_interleave(32, dim=1)[:, :columns]
    assert torch.equal(from_packed_int4(packed, scale, (rows, columns), 32), values.float() * scales)


def test_every_code_of_mxfp4_is_a_float_of_two_exponent_bits_and_one_of_mantissa() -> None:
    for code, value in enumerate(E2M1):
        sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
        assert value == sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, Quantization("fp8", (128, 128))),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Quantization("mxfp4")),
        (
            PACKED | {"config_groups": {"group_0": {"weights": INT4}}},
            Quantization("int4", group_size=32),
        ),
    ],
)
def test_supported_quantisations_are_read(declared: dict, expected: Quantization) -> None:
    assert quantization_of(declared, "config.json") == expected


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq 4 bits"),
        ({"quant_method": "gptq", "bits": 8}, "gptq 8 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8 without blocks"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "compressed-tensors nvfp4-pack"),
        (
            PACKED | {"config_groups": {"group_0": {"weights": INT4 | {"symmetric": False, "num_bits": 8}}}},
            "num_bits = 8, symmetric = False",
        ),
        ({}, "of an unnamed kind"),
    ],
)
def test_another_quantisation_is_named_and_refused(declared: dict, named: str) -> None:
    with pytest.raises(InputError, match=named):
        quantization_of(declared, "config.json")


def test_a_nested_declaration_and_modelopts_own_file_are_seen(tmp_path: Path) -> None:
    nested = {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.y"}}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_quantization(tmp_path) == Quantization()
    assert text_config(nested) == {"model_type": "deepseek_v3"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(InputError, match="ModelOpt NVFP4"):
        read_quantization(tmp_path)
    nested["text_config"]["quantization_config"] = {"quant_method": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    with pytest.raises(InputError, match="quantisation gptq"):
        read_quantization(tmp_path)
