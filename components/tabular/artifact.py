"""What an exported model of a table costs its users: time for a record, and size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.records import Record
from steadytrain.components.tabular.encoder import parsed
from steadytrain.components.tabular.model import load

_RECORDS: Final = 50


class Artifact(Record):
    """An exported model, as it was measured.

    latency_p50_ms, latency_p99_ms: for one record at a time, with its preparation.
    size_mb: of all files.
    """

    latency_p50_ms: float
    latency_p99_ms: float
    size_mb: float


def measured(folder: Path, records: pa.Table) -> Artifact:
    """Measure an exported model.

    Args:
        records: of a held-out side; the first ones are predicted one by one.
    """
    model, seconds = load(folder), list[float]()
    rows = parsed(records.slice(0, _RECORDS))
    for row in (rows[0], *rows):
        began = time.perf_counter()
        model.outputs([row], strict=False)
        seconds.append(time.perf_counter() - began)
    # The first one loads what the others share.
    p50, p99 = np.quantile(np.array(seconds[1:]) * 1e3, [0.5, 0.99]).tolist()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Artifact(
        latency_p50_ms=round(p50, 4), latency_p99_ms=round(p99, 4), size_mb=round(size / 1e6, 4)
    )
