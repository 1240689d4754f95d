"""What an exported model costs its users: time for an answer, and size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steadytrain.components.shared.records import Record


class Artifact(Record):
    """An exported model, as it was measured.

    latency_p50_ms, latency_p99_ms: for one record or series at a time, with its preparation.
    size_mb: of all files.
    """

    latency_p50_ms: float
    latency_p99_ms: float
    size_mb: float


def timed(folder: Path, answer: Callable[[Any], object], inputs: Sequence[Any]) -> Artifact:
    """Measure an exported model.

    Args:
        answer: of the model, to one of the inputs.
    """
    seconds = list[float]()
    for one in (inputs[0], *inputs):
        began = time.perf_counter()
        answer(one)
        seconds.append(time.perf_counter() - began)
    # The first one loads what the others share.
    p50, p99 = np.quantile(np.array(seconds[1:]) * 1e3, [0.5, 0.99]).tolist()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Artifact(
        latency_p50_ms=round(p50, 4), latency_p99_ms=round(p99, 4), size_mb=round(size / 1e6, 4)
    )
