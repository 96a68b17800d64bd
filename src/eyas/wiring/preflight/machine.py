"""This machine: is the port free, and what holds the GPUs? No torch."""

import errno
import socket
from contextlib import closing

from eyas.formats.problem import Problem
from eyas.launch.gpus import Gpu

BUSY_BYTES = 1 << 30
"""Memory held before a start, from which a GPU counts as busy: a bare driver context is below it."""


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
