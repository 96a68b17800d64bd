"""What a streamed reference would read and hold, from headers and config alone: no torch, no tensor read.

The peak is the largest layer: its attention, norms, router and shared experts in float32, one group of routed experts,
and the bytes that dequantising one tensor needs on the way; besides that the boundaries kept and the probe's own
activations.
"""

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.formats.headers import BITS, TensorHeader, read_headers
from eyas.formats.quantization import read_quantization
from eyas.formats.target_config import layer_prefix, read_config, text_config

FLOAT = 4
"""Bytes of a float32."""
EXPERT_GROUP = 4
"""Experts held at once."""
BEYOND = 2
"""Boundaries computed above the highest one asked for: identify compares with the neighbours on both sides."""
UNPACKING = 5
"""int32 or float32 copies of a tensor alive while its codes are unpacked, at most."""
EXPERT = re.compile(r"mlp\.experts\.(?:(\d+)\.)?")


@dataclass(frozen=True)
class Plan:
    """Bytes, all of them. `peak_bytes` is what must be free on the device and, to read, on the CPU."""

    quantization: str
    shards: int
    layers: int
    """Layers run: boundaries 0..layers are computed."""
    num_hidden_layers: int
    layer_bytes: int
    """The largest layer without its routed experts."""
    group_bytes: int
    """One group of routed experts."""
    unpack_bytes: int
    """On the way from stored codes to float32."""
    boundary_bytes: int
    activation_bytes: int
    read_bytes: int
    """At most this much is read from disk: experts that no token chooses are not."""

    @property
    def peak_bytes(self) -> int:
        return self.layer_bytes + self.group_bytes + self.unpack_bytes + self.boundary_bytes + self.activation_bytes

    @property
    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"peak_bytes": self.peak_bytes}


def plan(folder: Path, tokens: int = 256, up_to: int | None = None) -> Plan:
    """The plan of `stream_boundaries` over a probe of `tokens`. Raises InputError as opening the checkpoint does."""
    config, quantization, headers = text_config(read_config(folder)), read_quantization(folder), read_headers(folder)
    n = config["num_hidden_layers"]
    last = n if up_to is None else min(n, up_to + BEYOND)
    prefix = layer_prefix(headers, folder)
    layer_bytes, expert_bytes = [0] * last, [dict[str, int]() for _ in range(last)]
    largest = read = 0
    in_layer = re.compile(re.escape(f"{prefix}layers.") + r"(\d+)\.")
    for name, header in headers.items():
        place = in_layer.match(name)
        if place is None or int(place[1]) >= last:
            continue
        layer, experts = int(place[1]), EXPERT.match(name, place.end())
        read += stored_bytes(header)
        size = float_bytes(name, header)
        if experts is None:
            layer_bytes[layer] += size
        else:  # a stack of experts is read one row at a time
            key, size = (experts[1], size) if experts[1] else ("0", size // (header.shape or (1,))[0])
            expert_bytes[layer][key] = expert_bytes[layer].get(key, 0) + size
        largest = max(largest, size)
    expert = max((max(sizes.values()) for sizes in expert_bytes if sizes), default=0)
    return Plan(
        quantization=quantization.words,
        shards=len({header.file for header in headers.values()}),
        layers=last,
        num_hidden_layers=n,
        layer_bytes=max(layer_bytes, default=0),
        group_bytes=EXPERT_GROUP * expert,
        unpack_bytes=(UNPACKING if quantization.scheme != "none" else 1) * largest,
        boundary_bytes=(last + 1) * tokens * config["hidden_size"] * FLOAT,
        activation_bytes=activation_bytes(config, tokens),
        read_bytes=read,
    )


def stored_bytes(header: TensorHeader) -> int:
    assert header.shape is not None and header.dtype is not None, "read from a file"
    return math.prod(header.shape) * BITS[header.dtype] // 8


def float_bytes(name: str, header: TensorHeader) -> int:
    """Bytes in float32 of what `name` stands for; 0 for a scale or shape, which goes with its weight."""
    if name.endswith(("_scale_inv", "_scales", "weight_scale", "weight_shape")):
        return 0
    values = {"_blocks": 2, "_packed": 8}  # a byte of MXFP4, a word of int4
    per = next((count for suffix, count in values.items() if name.endswith(suffix)), 1)
    return math.prod(header.shape or ()) * per * FLOAT


def activation_bytes(config: dict[str, Any], tokens: int) -> int:
    """The widest moment of a forward: the scores of every head (twice), and the rows of the widest projection."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    head_dim = max(head_dim, config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0))
    widest = max(2 * config["intermediate_size"], 4 * heads * head_dim)
    return FLOAT * tokens * (3 * heads * tokens + 2 * widest + 8 * config["hidden_size"])
