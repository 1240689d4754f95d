"""What preprocessing left out because of other records, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LEFT_OUT: Final = ("exact_duplicate", "near_duplicate", "leakage", "conflicting_label")
"""The reasons, which are those of the quarantine file."""
_MUCH: Final = 0.1


def left_out(counts: Mapping[str, int], threshold: float | None) -> str:
    """Return the counts by reason, and the field that decides what is a near duplicate.

    Args:
        counts: records by reason; other reasons than those of LEFT_OUT are ignored.
        threshold: `data.near_duplicate_threshold`.

    Returns:
        For example "3 exact_duplicate, 51 near_duplicate (data.near_duplicate_threshold = 0.85)";
        "" if no record is left out.
    """
    parts = [f"{counts[reason]:,} {reason}" for reason in LEFT_OUT if counts.get(reason)]
    near = counts.get("near_duplicate") or counts.get("leakage")
    field = f" (data.near_duplicate_threshold = {threshold:g})" if near and threshold else ""
    return ", ".join(parts) + field


def much_left_out(counts: Mapping[str, int], threshold: float | None, records: int) -> str:
    """Return a sentence if more than a tenth of all records are left out, otherwise "".

    Args:
        counts, threshold: as for `left_out`.
        records: number of all records, used or not.
    """
    total = sum(counts.get(reason, 0) for reason in LEFT_OUT)
    if total <= _MUCH * records:
        return ""
    return (
        f"{total:,} of {records:,} records ({total / records:.0%}) are left out because of other "
        f"records: {left_out(counts, threshold)}"
    )
