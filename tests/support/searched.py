"""What a search leaves, for tests that compare searches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MEASURED = {
    "fit_seconds",
    "usd",
    "latency_p50_ms",
    "latency_p99_ms",
    "peak_memory_mb",
    "memory_mb",
}


def board_of(output: Path) -> dict[str, Any]:
    """Return the board of the only search in a folder of runs."""
    (path,) = output.glob("studies/*/board.json")
    return json.loads(path.read_bytes())


def without_times(board: dict[str, Any]) -> dict[str, Any]:
    """Return what of a board is the same each time."""
    rows = [
        {name: value for name, value in row.items() if name not in _MEASURED}
        for row in board["configurations"]
    ]
    kept = ("best_params", "best_score", "corrected_score", "better_than_default_lightgbm")
    return {"rows": rows, "skipped": board["skipped"]} | {name: board[name] for name in kept}
