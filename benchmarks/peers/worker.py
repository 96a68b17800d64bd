"""An engine in a process and an environment of its own, asked one prompt at a time: lines of JSON in and out.

Imports nothing but the standard library, so that any engine's interpreter can run it. A worker is `python ENGINE.py
JOB`; JOB is JSON: `target` and `draft` (paths in the engine's own format; `draft` null: plain decoding), `precision`,
`shape` (`num_steps`, `topk`, `num_draft_tokens`), `threads`, `room` (the longest text),
`stop_ids`, `eager` (uncompiled, for whom that makes a difference).

The first line out is `{"ready": {...}}`, what the engine says of itself, or `{"error": reason}`. Every line in,
`{"ids": [...], "max_tokens": n}`, is answered by one of
`ids` (what was generated, stop id included), `forwards` (of the target, after the prefill), `seconds_prefill` (to the
first token) and `seconds_decode` (from the first token to the last).
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

JSON = dict[str, Any]
PR_SET_PDEATHSIG = 1
"""Linux: die with the parent, who cannot wake a stopped worker any more (sys/prctl.h)."""


@dataclass(frozen=True)
class Answer:
    """One prompt continued greedily."""

    ids: list[int]
    forwards: int
    seconds_prefill: float
    seconds_decode: float


@dataclass(frozen=True)
class Running:
    """An engine that has started: `answer(prompt ids, max_tokens)`, and facts for the report."""

    answer: Callable[[list[int], int], Answer]
    facts: JSON


def serve(start: Callable[[JSON], Running]) -> None:
    """Start the engine of the job in argv and answer until stdin ends. What it prints goes to stderr."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        running = start(json.loads(sys.argv[1]))
        running.answer([1, 2, 3, 4], 8)
    except Exception as error:  # noqa: BLE001 - any engine's any failure voids its row and ends this process
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        sys.exit(1)
    print(json.dumps({"ready": running.facts}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asdict(running.answer(asked["ids"], asked["max_tokens"]))), file=out, flush=True)


def to_stop(ids: list[int], stop_ids: list[int]) -> list[int]:
    """`ids` up to the first stop id, which is kept."""
    ends = [place for place, token in enumerate(ids) if token in stop_ids]
    return ids[: ends[0] + 1] if ends else ids
