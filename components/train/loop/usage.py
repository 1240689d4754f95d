"""What each rank uses of its machine, now and then."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import psutil
import torch

from steadytrain.components.shared.events import EventStream
from steadytrain.components.shared.events.types import BatchSplit, RankUsage
from steadytrain.components.shared.workspace import Workspace

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


EVERY_SECONDS: Final = 30.0


class Usage:
    """Reports a rank's use of memory, processor and GPU every EVERY_SECONDS.

    The training thread calls `report` after each step, so that no other thread competes with it.
    """

    def __init__(
        self,
        workspace: Workspace,
        attempt: int,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workspace, self.attempt, self.rank, self.clock = workspace, attempt, rank, clock
        self._process, self._stream, self._count = psutil.Process(), EventStream(), 0
        self._process.cpu_percent()
        self._last = clock()

    def report(self) -> None:
        """Report if it is time."""
        now = self.clock()
        if now - self._last < EVERY_SECONDS:
            return
        self._last, self._count = now, self._count + 1
        if self._count == 1:
            # No file for a rank that is done sooner, and no failure for one that cannot write it.
            with suppress(OSError):
                self._stream = self.workspace.stream(f"usage-a{self.attempt}-r{self.rank}")
        gpu: dict[str, Any] = gpu_use() if _has_gpu() else {}
        self._stream.emit(
            RankUsage(
                attempt=self.attempt,
                rank=self.rank,
                sample=self._count,
                memory_used=self._process.memory_info().rss,
                cores_used=self._process.cpu_percent() / 100,
                **gpu,
            )
        )


def report_split(
    workspace: Workspace, attempt: int, rank: int, work: str, rows: int, instead_of: int
) -> None:
    """Report that memory ran out for a batch of rows that another model worked on."""
    # As above, no failure for a rank that cannot write it.
    with suppress(OSError):
        workspace.add_events(
            f"splits-a{attempt}-r{rank}",
            BatchSplit(stage="train", work=work, rows=rows, instead_of=instead_of, rank=rank),
        )


def _has_gpu() -> bool:
    """Return whether this process computes on a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
