"""How much this rank's GPU is used: its memory by torch, its time by the driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

_NVML = "libnvidia-ml.so.1"
"""NVIDIA's management library, a part of every driver."""


def gpu_use() -> dict[str, Any]:
    """Return the fields of `TrainingStep` about this rank's GPU."""
    stats = torch.cuda.memory_stats()
    return {
        "gpu_memory_used": stats.get("allocated_bytes.all.current", 0),
        "gpu_memory_reserved": stats.get("reserved_bytes.all.current", 0),
        "gpu_memory_peak": stats.get("allocated_bytes.all.peak", 0),
        "gpu_memory_retries": stats.get("num_alloc_retries", 0),
        "gpu_utilization": _meter(torch.cuda.current_device())(),
    }


@functools.cache
def _meter(device: int) -> Callable[[], float | None]:
    return utilization_of(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


class _Rates(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def utilization_of(uuid: str, library: str = _NVML) -> Callable[[], float | None]:
    """Return a function that reads the utilization of the GPU with a UUID, 0 to 1.

    The function returns None if the driver does not say it, as on a part of a GPU (MIG).
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return lambda: None
    handle, rates = ctypes.c_void_p(), _Rates()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(
        uuid.encode(), ctypes.byref(handle)
    )
    if failed:
        return lambda: None

    def read() -> float | None:
        status = nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates))
        return None if status else rates.gpu / 100

    return read
