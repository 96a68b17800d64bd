"""A trainer in a process of its own, stepped from outside: one line in, one step done, one line of JSON out.

Imports torch alone, so that any environment can run it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn


def optimiser_step(parameters: Iterable[nn.Parameter], rate: float = 1e-4) -> Callable[[], None]:
    """Clipping and AdamW in one pass over the parameters: the same for everyone."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def memory_mb(name: str) -> float:
    """VmRSS, or VmHWM: the largest VmRSS since it was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def serve(step: Callable[[int | None], dict[str, Any]]) -> None:
    """`step(documents)` trains on the first so many, or on all. One step on one document makes the first line out;
    after an untimed one on all, each line that comes in is answered by a timed one."""
    torch.set_num_threads(int(os.environ["EYAS_BENCH_THREADS"]))
    out, sys.stdout = sys.stdout, sys.stderr
    facts = step(1)
    step(None)
    Path("/proc/self/clear_refs").write_text("5")
    resting = memory_mb("VmRSS")
    print(json.dumps(facts), file=out, flush=True)
    for _ in sys.stdin:
        started, worked = time.perf_counter(), time.process_time()
        step(None)
        seconds, cpu = time.perf_counter() - started, time.process_time() - worked
        facts = {"seconds": seconds, "cpu_seconds": cpu, "resting_mb": resting, "peak_mb": memory_mb("VmHWM")}
        print(json.dumps(facts), file=out, flush=True)
