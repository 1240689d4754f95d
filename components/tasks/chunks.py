"""How the fused loss is cut. Nothing here imports torch, since the plan's formulas ask too."""

from __future__ import annotations

from typing import Final

_VALUES: Final = 2**24
"""Logits of a chunk, and what is added to the head's gradient at a time: 64 MiB in 32 bits."""
_LEAST_ROWS: Final = 256
"""Fewer would leave a matrix product idle, and the head's gradient is read and written for each."""


def chunk_rows(vocabulary: int) -> int:
    """Rows of logits that are made at a time."""
    return max(_LEAST_ROWS, _VALUES // vocabulary)


def product_rows(width: int) -> int:
    """Rows of the head's gradient that are added to at a time, in 16 bits."""
    return max(1, _VALUES // width)
