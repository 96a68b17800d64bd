"""Which quantisation a checkpoint declares, and whether Eyas can undo it: read from its config, no torch.

Supported, as published: plain floats; block-scaled fp8 (DeepSeek-V3, Kimi-K2: `weight_scale_inv`); MXFP4 (gpt-oss:
`*_blocks`, `*_scales`); compressed-tensors pack-quantised int4 (Kimi-K2.5: `weight_packed`, `weight_scale`,
`weight_shape`). Any other is named and refused: guessing a layout would give states that match nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.errors import Unsupported
from eyas.formats.target_config import TEXT_CONFIGS, read_config, read_json

Scheme = Literal["none", "fp8", "mxfp4", "int4"]
SUPPORTED = "plain floats, block-scaled fp8, MXFP4, or compressed-tensors pack-quantized int4 (symmetric, by group)"
MODELOPT_FILE = "hf_quant_config.json"
BLOCK = (128, 128)


@dataclass(frozen=True)
class Quantization:
    """What to undo. `block` is the fp8 scale's block (rows, columns); `group_size` the int4 scale's columns."""

    scheme: Scheme = "none"
    block: tuple[int, int] = BLOCK
    group_size: int = 32

    @property
    def words(self) -> str:
        return {
            "none": "not quantised",
            "fp8": f"fp8 e4m3 in blocks of {self.block[0]} x {self.block[1]}",
            "mxfp4": "MXFP4",
            "int4": f"int4, one scale for {self.group_size} columns",
        }[self.scheme]


def read_quantization(folder: Path) -> Quantization:
    """What `folder` declares: in config.json, nested in its text_config, or in ModelOpt's own file.

    Raises InputError, with the quantisation's name, for one that is not supported.
    """
    where = folder / "config.json"
    config = read_config(folder)
    texts = [config, *(config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), Mapping))]
    declared = next((text["quantization_config"] for text in texts if text.get("quantization_config")), None)
    modelopt = folder / MODELOPT_FILE
    if declared is None and modelopt.is_file():
        inner = read_json(modelopt).get("quantization", {})
        raise _refused(f"ModelOpt {inner.get('quant_algo', 'of an unknown kind')}", modelopt)
    return Quantization() if declared is None else quantization_of(declared, where)


def quantization_of(declared: Mapping[str, Any], where: Path | str) -> Quantization:
    """The `quantization_config` of a config.json, understood. Raises InputError for an unsupported one."""
    method = str(declared.get("quant_method", "of an unnamed kind"))
    if method == "fp8":
        return _fp8(declared, where)
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method == "compressed-tensors":
        return _compressed_tensors(declared, where)
    detail = declared.get("quant_algo") or (f"{declared['bits']} bits" if "bits" in declared else "")
    raise _refused(f"{method} {detail}".strip(), where)


def _fp8(declared: Mapping[str, Any], where: Path | str) -> Quantization:
    block = declared.get("weight_block_size")
    if declared.get("fmt", "e4m3") != "e4m3":
        raise _refused(f"fp8 {declared['fmt']}", where)
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(x) is int and x > 0 for x in block)):
        raise _refused(f"fp8 without blocks (weight_block_size = {block!r})", where)
    return Quantization("fp8", block=(block[0], block[1]))


def _compressed_tensors(declared: Mapping[str, Any], where: Path | str) -> Quantization:
    layout = declared.get("format")
    groups = [group for group in (declared.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    if layout != "pack-quantized" or len(groups) != 1:
        raise _refused(f"compressed-tensors {layout} with {len(groups)} config groups", where)
    weights = groups[0].get("weights") or {}
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    differing = {name: weights.get(name) for name, value in wanted.items() if weights.get(name) != value}
    if weights.get("actorder"):
        differing["actorder"] = weights["actorder"]
    if differing:
        named = ", ".join(f"{name} = {value!r}" for name, value in differing.items())
        raise _refused(f"compressed-tensors pack-quantized with {named}", where)
    group_size = weights.get("group_size")
    if type(group_size) is not int or group_size < 1:
        raise _refused(f"compressed-tensors pack-quantized with group_size = {group_size!r}", where)
    return Quantization("int4", group_size=group_size)


def _refused(name: str, where: Path | str) -> Unsupported:
    return Unsupported(
        wanted=f"a checkpoint of {SUPPORTED}",
        got=f"quantisation {name}",
        where=str(where),
        next="give the unquantised checkpoint, or one in a supported format, as the reference",
    )
