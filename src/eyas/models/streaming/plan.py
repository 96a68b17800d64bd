"""What a streamed reference would read and hold, from headers and config alone: no torch, no tensor read.

The peak is the widest layer: its attention, norms, router and shared experts in float32, one group of routed experts,
and what dequantising them needs on the way; besides that the boundaries kept and the probe's own activations.
"""

import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from eyas.errors import Unsupported
from eyas.formats.headers import BITS, TensorHeader, read_headers
from eyas.formats.quantization import read_quantization
from eyas.formats.target_config import layer_prefix, read_config, text_config

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
SHARE_OF_MEMORY = 0.5
"""A target is loaded whole where its float32 weights take less than this share of the free memory: loading holds the
stored weights beside them for a moment."""
FLOAT = 4
"""Bytes of a float32."""
EXPERT_GROUP = 4
"""Experts held at once."""
BEYOND = 2
"""Boundaries computed above the highest one asked for: identify compares with the neighbours on both sides."""
UNPACKING = 5
"""int32 and float32 copies of a tensor alive while 4-bit codes are unpacked, at most; else one, of what is stored."""
PACKED = {"_blocks": 2, "_packed": 8}
"""Values in a byte of MXFP4, in a word of int4."""
EXPERT = re.compile(r"mlp\.experts\.(?:(\d+)\.)?")


def fits(folder: Path) -> bool:
    """Whether to load `folder` whole: plain floats, a tokenizer beside them, and small enough."""
    if not list(folder.glob("*.safetensors")):
        return True  # loading says what is wrong with it
    if quantised(folder) or not any((folder / name).is_file() for name in TOKENIZERS):
        return False
    needed = sum(float_bytes(name, header) for name, header in read_headers(folder).items())
    return needed < SHARE_OF_MEMORY * psutil.virtual_memory().available


def quantised(folder: Path) -> bool:
    """Whether the weights are stored in codes: streaming undoes those it knows, and names the rest."""
    try:
        return read_quantization(folder).scheme != "none"
    except Unsupported:
        return True


@dataclass
class Layer:
    """Bytes of one layer: held outside its experts, of each expert, and on the way from stored codes to float32."""

    held: int = 0
    experts: dict[str, int] = field(default_factory=dict)
    unpack: int = 0
    unpack_expert: int = 0

    def add(self, name: str, header: TensorHeader, expert: re.Match[str] | None) -> None:
        size = float_bytes(name, header)
        if expert is None:
            self.held += size
            self.unpack = max(self.unpack, unpack_bytes(name, size))
            return
        if expert[1] is None:  # a stack of experts is read one row at a time
            size //= (header.shape or (1,))[0]
        index = expert[1] or "0"
        self.experts[index] = self.experts.get(index, 0) + size
        parts = 0 if expert[1] is None else size  # gate and up are read apart, then joined
        self.unpack_expert = max(self.unpack_expert, unpack_bytes(name, size) + parts)

    @property
    def group(self) -> int:
        """One group of experts, in float32."""
        return EXPERT_GROUP * max(self.experts.values(), default=0)

    @property
    def unpacking(self) -> int:
        """The experts of a group are unpacked at once, by a thread each."""
        return max(self.unpack, EXPERT_GROUP * self.unpack_expert)

    @property
    def peak(self) -> int:
        return self.held + self.group + self.unpacking


@dataclass(frozen=True)
class Plan:
    """What `stream_boundaries` takes. `peak_bytes` is what must be free; the other sizes are the largest of any layer,
    and need not fall together."""

    quantization: str
    shards: int
    layers: int
    """Layers run: boundaries 0..layers are computed."""
    num_hidden_layers: int
    layer_bytes: int
    """A layer without its routed experts."""
    group_bytes: int
    """One group of routed experts."""
    unpack_bytes: int
    """On the way from stored codes to float32."""
    boundary_bytes: int
    activation_bytes: int
    read_bytes: int
    """At most this much is read from disk: experts that no token chooses are not."""
    peak_bytes: int

    @property
    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(folder: Path, tokens: int = 256, up_to: int | None = None) -> Plan:
    """The plan of a reference over a probe of `tokens`. Raises InputError as opening the checkpoint does."""
    config, quantization, headers = text_config(read_config(folder)), read_quantization(folder), read_headers(folder)
    n = config["num_hidden_layers"]
    last = n if up_to is None else min(n, up_to + BEYOND)
    layers, read = layers_of(headers, layer_prefix(headers, folder), last)
    boundaries, activations = (last + 1) * tokens * config["hidden_size"] * FLOAT, activation_bytes(config, tokens)
    return Plan(
        quantization=quantization.words,
        shards=len({header.file for header in headers.values()}),
        layers=last,
        num_hidden_layers=n,
        layer_bytes=max((layer.held for layer in layers), default=0),
        group_bytes=max((layer.group for layer in layers), default=0),
        unpack_bytes=max((layer.unpacking for layer in layers), default=0),
        boundary_bytes=boundaries,
        activation_bytes=activations,
        read_bytes=read,
        peak_bytes=max((layer.peak for layer in layers), default=0) + boundaries + activations,
    )


def layers_of(headers: dict[str, TensorHeader], prefix: str, last: int) -> tuple[list[Layer], int]:
    """The first `last` layers, and the stored bytes of their tensors."""
    layers, read = [Layer() for _ in range(last)], 0
    in_layer = re.compile(re.escape(f"{prefix}layers.") + r"(\d+)\.")
    for name, header in headers.items():
        place = in_layer.match(name)
        if place is not None and int(place[1]) < last:
            layers[int(place[1])].add(name, header, EXPERT.match(name, place.end()))
            read += stored_bytes(header)
    return layers, read


def stored_bytes(header: TensorHeader) -> int:
    assert header.shape is not None and header.dtype is not None, "read from a file"
    return math.prod(header.shape) * BITS[header.dtype] // 8


def float_bytes(name: str, header: TensorHeader) -> int:
    """Bytes in float32 of what `name` stands for; 0 for a scale or shape, which goes with its weight."""
    if name.endswith(("_scale_inv", "_scales", "weight_scale", "weight_shape")):
        return 0
    per = next((count for suffix, count in PACKED.items() if name.endswith(suffix)), 1)
    return math.prod(header.shape or ()) * per * FLOAT


def unpack_bytes(name: str, size: int) -> int:
    return size * (UNPACKING if name.endswith(tuple(PACKED)) else 1)


def activation_bytes(config: dict[str, Any], tokens: int) -> int:
    """The widest moment of a forward: the scores of every head (twice), and the rows of the widest projection."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    head_dim = max(head_dim, config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0))
    widest = max(2 * config["intermediate_size"], 4 * heads * head_dim)
    return FLOAT * tokens * (3 * heads * tokens + 2 * widest + 8 * config["hidden_size"])
