"""The layers that an engine's log says it reads for the draft, in the engine's own numbers.

vLLM 0.20 to 0.33, as read, once a rank while weights load. V1 runner (v1/worker/gpu_model_runner.py): `Using auxiliary
layers from speculative config: (2, 18, 33)`, and no line where it takes the default of the target's class. Model Runner
V2 (v1/worker/gpu/spec_decode/eagle/eagle3_utils.py): `Using Eagle3 auxiliary layers from config: ...`, or `... from
model: ...` for that default. SGLang 0.5.11 to 0.5.23 says nothing of them.
"""

import re
from typing import NamedTuple

from eyas.formats.engines import Runner
from eyas.formats.taps import TapSource

STARTS = ("Using auxiliary layers from ", "Using Eagle3 auxiliary layers from ")
RUNNERS: dict[str, Runner] = {"Starting to load model ": "v1", "Loading model from scratch": "v2"}
"""How each runner begins to load the target (gpu_model_runner.py and cpu_model_runner.py; gpu/model_runner.py)."""
MAX_IDS = 64
LINE = re.compile(
    rf"(?:{'|'.join(STARTS)})(?P<source>speculative config|config|model): "
    rf"[(\[](?P<ids>-?\d{{1,5}}(?:, ?-?\d{{1,5}}){{0,{MAX_IDS - 1}}}),?[)\]] *$"
)


class SaidTaps(NamedTuple):
    """Layer ids as the engine counts, and where it has them from."""

    ids: tuple[int, ...]
    source: TapSource


def said_taps(message: str) -> SaidTaps | None:
    """What a message, its head taken off, says of them; None where it is another line, or cut."""
    match = LINE.match(message)
    if match is None:
        return None
    return SaidTaps(tuple(map(int, match["ids"].split(","))), "model" if match["source"] == "model" else "config")


def runner_of(message: str) -> Runner | None:
    """Which of vLLM's runners begins to load with `message`: V1 tells its layers only where it does not default."""
    return next((runner for start, runner in RUNNERS.items() if message.startswith(start)), None)
