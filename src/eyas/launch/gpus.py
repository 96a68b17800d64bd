"""The GPUs of this machine, by NVML through ctypes where the driver is there. No torch."""

import ctypes
from dataclasses import dataclass


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
