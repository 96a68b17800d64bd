"""This machine: is the port free, and what holds the GPUs? NVML through ctypes where the driver is there. No torch."""

import ctypes
import errno
import socket
from contextlib import closing
from dataclasses import dataclass

from eyas.formats.problem import Problem

BUSY_BYTES = 1 << 30
"""Memory held before a start, from which a GPU counts as busy: a bare driver context is below it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: total and used memory in bytes."""

    index: int
    name: str
    total: int
    used: int
    processes: tuple[int, ...] = ()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def gpus() -> list[Gpu] | None:
    """The GPUs of this machine by NVML; None where there is no NVIDIA driver or it does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        return [gpu for index in range(count.value) if (gpu := _gpu(nvml, index)) is not None]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    nvml.nvmlDeviceGetName(handle, name, 96)
    count, running = ctypes.c_uint(64), (_Process * 64)()
    answered = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), running) == 0
    pids = tuple(running[i].pid for i in range(min(count.value, 64))) if answered else ()
    return Gpu(index, name.value.decode(errors="replace"), memory.total, memory.used, pids)


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
