"""What became of the records that preprocessing read, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.shared.class_names import listed
from steadytrain.components.shared.redaction import on_one_line

if TYPE_CHECKING:
    from steadytrain.components.shared.records import DataRecord

LEFT_OUT: Final = {
    "exact_duplicate": "the same content as a record that is kept",
    "near_duplicate": "nearly the same content as another record of its side "
    "(data.near_duplicate_threshold)",
    "leakage": "a duplicate or near duplicate of a held-out record (data.near_duplicate_threshold)",
    "group_leakage": "the same group or prompt as a held-out record of a split that the data give, "
    "or the same text in another of data.parts",
    "conflicting_label": "the same content occurs with another label",
}
"""By reason: why a good record is left out because of another record."""
LONG: Final = {
    "dropped_as_long": "longer than data.sequence_length, with data.long_records = drop",
    "cut_to_nothing": "its first data.sequence_length tokens teach nothing, with "
    "data.long_records = cut",
}
"""By reason: why a good record is left out that is longer than a row."""
SET_ASIDE: Final = LEFT_OUT | LONG
"""By reason, as in the quarantine file: why a good record is left out."""
_MUCH: Final = 0.1
_SHOWN: Final = 12
"""Columns in a message."""


def detections(files: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each thing that was found out about files, with how many have it."""
    for what, count in files.items():
        read = "1 file is" if count == 1 else f"{count:,} files are"
        fix = "if that is wrong, fix the header or set the fields of data.csv"
        yield f"{read} read with {what}; {fix}"


def counted(reasons: Iterable[str], counts: Mapping[str, int]) -> list[str]:
    """Return the counts of these reasons that occur, such as "3 leakage"."""
    return [f"{counts[reason]:,} {reason}" for reason in reasons if counts.get(reason)]


def left_out(counts: Mapping[str, int], threshold: float | None) -> str:
    """Return the counts by reason, and the field that decides what is a near duplicate.

    Args:
        counts: records by reason; other reasons than those of LEFT_OUT are ignored.
        threshold: `data.near_duplicate_threshold`.

    Returns:
        For example "3 exact_duplicate, 51 near_duplicate (data.near_duplicate_threshold = 0.85)";
        "" if no record is left out.
    """
    near = counts.get("near_duplicate") or counts.get("leakage")
    return ", ".join(counted(LEFT_OUT, counts)) + (_field(threshold) if near else "")


def _field(threshold: float | None) -> str:
    return f" (data.near_duplicate_threshold = {threshold:g})" if threshold else ""


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
    windows = [f"{windowed:,} in windows"] if windowed else []
    return ", ".join([f"{cut:,} cut", *windows, *counted(LONG, counts)])


def unused_keys(unread: Mapping[str, int], unprinted: Mapping[str, int]) -> str:
    """Return which keys of messages are not used, with the number of messages, or "".

    Args:
        unread: keys that nothing reads.
        unprinted: keys that the chat template does not print.
    """
    kinds = {"nothing reads": unread, "the chat template does not print": unprinted}
    return "; ".join(
        f"keys of messages that {what}: {_most_first(keys)}" for what, keys in kinds.items() if keys
    )


def _most_first(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return listed([f"{count:,} {on_one_line(name)}" for name, count in ordered])


def in_one_line(record: DataRecord, card: Mapping[str, Any]) -> str:
    """Return what became of every record that was read, and what is learned.

    Args:
        card: the data card (card.json).
    """
    counts = card["duplicates"]
    cut, windowed = (
        sum(side.get(what, 0) for side in card["sides"].values())
        for what in ("truncated", "windowed")
    )
    near = _field(card.get("near_duplicate_threshold"))
    aside = ", ".join(f"{counts.get(reason, 0):,} {reason}" for reason in LEFT_OUT)
    used = ", ".join(
        f"{side} {record.sides[side].documents:,}" for side in ("train", "validation", "test")
    )
    share, tokens = card["sides"]["train"].get("target_share"), record.sides["train"].tokens
    targets = "the targets are labels" if record.labels else "no fixed target tokens"
    if share is not None:
        targets = f"{share:.1%} of them targets"
    learned = f"; {tokens:,} training tokens, {targets}" if record.tokenizer else ""
    keys = unused_keys(card.get("unread_keys", {}), card.get("unprinted_keys", {}))
    files = ", ".join(f"{count:,} {what}" for what, count in card.get("left_out", {}).items())
    return (
        f"{card['records']:,} records read, {card['defective']:,} defective, {aside}{near}, "
        f"{longer(cut, windowed, card.get('quarantine', {}))}; used: {used}{learned}"
        f"{'; ' if keys else ''}{keys}{unused_columns(card.get('unused', {}))}"
        f"{'; files left out: ' if files else ''}{files}"
    )


def unused_columns(counts: Mapping[str, int]) -> str:
    """Return the columns with text that nothing reads, as the end of a sentence, or "".

    Args:
        counts: number of records by column.
    """
    shown = [f"{readable(name)} ({count:,} records)" for name, count in counts.items()]
    more = [f"and {len(shown) - _SHOWN:,} more"] if len(shown) > _SHOWN else []
    return f"; not used: {', '.join(shown[:_SHOWN] + more)}" if shown else ""


def readable(name: str) -> str:
    """Return a column's name as text without control characters, and with its spaces visible."""
    return name if name.isprintable() and name and name == name.strip() else repr(name)
