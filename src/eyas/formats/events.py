"""TensorBoard's event files, written without TensorBoard: records of protocol buffers with checksums.

Source: TensorFlow's record format (length, masked CRC-32C of it, data, masked CRC-32C of it; little endian) and
`Event` (1 wall_time double, 2 step int64, 3 file_version, 5 summary), `Summary.Value` (1 tag, 2 simple_value float).
"""

import struct
from collections.abc import Mapping
from itertools import chain
from typing import Any

VERSION = b"brain.Event:2"
NOT_DRAWN = ("step", "time")


def _crc_table() -> list[int]:
    """CRC-32C (Castagnoli), reflected, a byte at a time."""
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """The CRC-32C of `data`, turned and shifted as record files keep it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def first_record(time: float) -> bytes:
    """What a file begins with."""
    return record(struct.pack("<Bd", 0x09, time) + _bytes_field(0x1A, VERSION))


def scalars_record(line: Mapping[str, Any]) -> bytes:
    """One line of metrics: every number a scalar of its key at the line's `step` and `time`; lists and tables one an
    entry."""
    values = b"".join(
        _bytes_field(0x0A, _bytes_field(0x0A, tag.encode()) + struct.pack("<Bf", 0x15, value))
        for tag, value in chain.from_iterable(_numbers(key, value) for key, value in line.items())
    )
    head = struct.pack("<Bd", 0x09, line.get("time", 0.0)) + b"\x10" + _varint(line["step"])
    return record(head + _bytes_field(0x2A, values))


def _numbers(key: str, value: Any) -> list[tuple[str, float]]:
    if key in NOT_DRAWN:
        return []
    if isinstance(value, list | dict):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return [(f"{key}/{place}", number) for place, number in entries]
    return [(key, value)] if isinstance(value, int | float) else []


def _bytes_field(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
