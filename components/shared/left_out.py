"""What became of the records that preprocessing read, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from steadytrain.components.shared.records import DataRecord

LEFT_OUT: Final = ("exact_duplicate", "near_duplicate", "leakage", "conflicting_label")
"""The reasons, which are those of the quarantine file."""
LONG: Final = ("dropped_as_long", "cut_to_nothing")
"""The reasons why records longer than a row are left out, which are those of the quarantine file.
"""
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


def longer(cut: int, windowed: int, counts: Mapping[str, int]) -> str:
    """Return what became of the records that are longer than a row.

    Args:
        cut, windowed: records of all sides.
        counts: records by reason; other reasons than those of LONG are ignored.
    """
    parts = [f"{windowed:,} in windows"] if windowed else []
    parts += [f"{counts[reason]:,} {reason}" for reason in LONG if counts.get(reason)]
    return ", ".join([f"{cut:,} cut", *parts])


def in_one_line(record: DataRecord, card: Mapping[str, Any]) -> str:
    """Return what became of every record that was read, and what is learned.

    Args:
        card: the data card (card.json).
    """
    counts, threshold = card["duplicates"], card.get("near_duplicate_threshold")
    cut, windowed = (
        sum(side.get(what, 0) for side in card["sides"].values())
        for what in ("truncated", "windowed")
    )
    near = f" (data.near_duplicate_threshold = {threshold:g})" if threshold else ""
    aside = ", ".join(f"{counts.get(reason, 0):,} {reason}" for reason in LEFT_OUT)
    used = ", ".join(
        f"{side} {record.sides[side].documents:,}" for side in ("train", "validation", "test")
    )
    share, tokens = card["sides"]["train"].get("target_share"), record.sides["train"].tokens
    targets = "the targets are labels" if record.labels else "no fixed target tokens"
    if share is not None:
        targets = f"{share:.1%} of them targets"
    learned = f"; {tokens:,} training tokens, {targets}" if record.tokenizer else ""
    return (
        f"{card['records']:,} records read, {card['defective']:,} defective, {aside}{near}, "
        f"{longer(cut, windowed, card.get('quarantine', {}))}; used: {used}{learned}"
    )
