"""This machine: is the port free, what holds the GPUs, and does a CPU engine find the memory it asks for? No torch."""

import errno
import os
import socket
from contextlib import closing

import psutil

from eyas.formats.problem import Problem
from eyas.launch.arguments import Launch
from eyas.launch.gpus import Gpu
from eyas.launch.kernel import memory_limit
from eyas.wiring.preflight.memory import FRACTIONS

BUSY_BYTES = 1 << 30
"""Memory held before a start, from which a GPU counts as busy: a bare driver context is below it."""


SHARES = 20
"""A share of the memory is proposed in so many steps, a tenth of what is free left aside."""
CPU_SIZES = ("--kv-cache-memory-bytes", "VLLM_CPU_KVCACHE_SPACE")
"""What gives vLLM's cache on a CPU a size of its own; then no share is asked for."""


def host_memory() -> tuple[int, int]:
    """(bytes in all, bytes free) of this machine, or of its control group where that has less."""
    memory, (limit, used) = psutil.virtual_memory(), memory_limit()
    if limit is None or limit >= memory.total:
        return memory.total, memory.available
    return limit, min(memory.available, max(limit - used, 0))


def cpu_memory_problem(launch: Launch) -> Problem | None:
    """`memory_short` where vLLM on a CPU would ask for a larger share of the memory than is free, and refuse to start.

    --gpu-memory-utilization is the share of the machine's memory there (vllm-cpu 0.32 v1/worker/cpu_worker.py:73-96).
    """
    if CPU_SIZES[0] in launch.flags or launch.env.get(CPU_SIZES[1], os.environ.get(CPU_SIZES[1])):
        return None
    total, free = host_memory()
    fraction = launch.memory_fraction or FRACTIONS["vllm"]
    if total * fraction <= free:
        return None
    share = int(0.9 * SHARES * free / total) / SHARES
    flag = f"--gpu-memory-utilization {share:.2f}" if share else ""
    return Problem(
        "memory_short",
        where="this machine's memory",
        expected=f"{total * fraction / 2**30:.1f} GiB free: {fraction:g} of all, which vLLM takes on a CPU",
        found=f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        fix=f"--engine-args '{flag}'" if share else "end what holds the memory",
    )


def gpu_problems(found: list[Gpu], needed: int) -> list[Problem]:
    """GPUs among the first `needed` that something holds, and too few of them."""
    problems = [
        Problem(
            "gpu_busy",
            where=f"GPU {gpu.index} ({gpu.name})",
            expected="free memory",
            found=f"{gpu.used / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB used"
            + (f" by pid {', '.join(map(str, gpu.processes))}" if gpu.processes else ""),
            fix="stop what holds it, or choose others with CUDA_VISIBLE_DEVICES",
        )
        for gpu in found[:needed]
        if gpu.used >= BUSY_BYTES
    ]
    if len(found) < needed:
        expected, got = f"{needed} GPUs (tp x pp)", f"{len(found)}"
        fix = f"tensor parallel {max(len(found), 1)}, or a machine with {needed}"
        problems.append(Problem("memory_short", where="GPUs", expected=expected, found=got, fix=fix))
    return problems


def port_problem(port: int) -> Problem | None:
    """`port_busy` where something listens, on whichever address, or the port cannot be taken."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            words = "taken" if getattr(error, "errno", None) == errno.EADDRINUSE else str(error)
            fix = f"--port {port + 1 if port < 65535 else port - 1}, or stop what listens there"
            return Problem("port_busy", where=f"port {port}", expected="free", found=words, fix=fix)
    return None
