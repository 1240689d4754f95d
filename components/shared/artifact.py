"""What an exported model costs its users: time for an answer, memory, and size."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from steadytrain.components.shared.bounded import peak_memory
from steadytrain.components.shared.records import Record

_RESET: Final = Path("/proc/self/clear_refs")
_FROM_NOW: Final = b"5"
"""What resets the peak of resident memory (proc(5))."""


class Artifact(Record):
    """An exported model, as it was measured.

    latency_p50_ms, latency_p99_ms: for one record or series at a time, with its preparation.
    memory_mb: what loading it and answering added to the resident memory of a process that has the
        libraries, at the peak. None if this system does not say it.
    size_mb: of all files.
    """

    latency_p50_ms: float
    latency_p99_ms: float
    memory_mb: float | None
    size_mb: float


def timed(
    folder: Path,
    opened: Callable[[], Callable[[Any], object]],
    inputs: Sequence[Any],
    *,
    late_libraries: bool = False,
) -> Artifact:
    """Measure an exported model.

    Args:
        opened: loads it, and returns what answers one of the inputs.
        late_libraries: whether that may import the libraries, which do not count.
    """
    if late_libraries:
        opened()(inputs[0])
    before = _memory_from_now()
    answer, seconds = opened(), list[float]()
    for one in (inputs[0], *inputs):
        began = time.perf_counter()
        answer(one)
        seconds.append(time.perf_counter() - began)
    added = None if before is None else max(0, peak_memory() - before)
    # The first one loads what the others share.
    p50, p99 = np.quantile(np.array(seconds[1:]) * 1e3, [0.5, 0.99]).tolist()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Artifact(
        latency_p50_ms=round(p50, 4),
        latency_p99_ms=round(p99, 4),
        memory_mb=None if added is None else round(added / 1e6, 4),
        size_mb=round(size / 1e6, 4),
    )


def _memory_from_now() -> int | None:
    """Return the resident bytes of this process, from which its peak now counts; None if it cannot.

    Memory that was freed goes back to the system first: it would be used without being counted.
    """
    gc.collect()
    with suppress(AttributeError):
        # Only glibc has it.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _RESET.write_bytes(_FROM_NOW)
    except OSError:
        return None
    return peak_memory()
