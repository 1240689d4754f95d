"""How many values DeepSpeed's ranks exchange at a time."""

from __future__ import annotations

from typing import Final

LARGEST_BUCKET: Final = 50_000_000
"""Values that ranks exchange at a time. DeepSpeed's own default is ten times as large, and
allocated regardless of the model's size: 4 GB of a GPU."""


def bucket_values(parameters: int) -> int:
    """Return the values of a bucket for a number of parameters."""
    return min(LARGEST_BUCKET, parameters)
