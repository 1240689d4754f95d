"""The prepared data as tables: for the data card, and for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict

from steadytrain.components.shared.class_names import listed
from steadytrain.components.shared.left_out import SET_ASIDE
from steadytrain.components.shared.quantities import number, percent
from steadytrain.components.shared.records import DataRecord, Side, SideRecord
from steadytrain.components.tasks.encoding.fields import DEFECTS

_SIDES = get_args(Side)
_COLUMNS = (
    *("Documents", "Share", "MB of text", "Sequences", "Tokens"),
    *("In the loss", "Targets", "Filled", "Cut", "In windows"),
)


class CardSide(BaseModel):
    """The fields of a side in card.json that a page shows."""

    bytes: int = 0
    fill: float = 0.0
    target_share: float | None = None
    lengths: list[tuple[int, int, int]] = []
    truncated: int = 0
    windowed: int = 0
    labels: dict[str, int] = {}
    label_counts: dict[int, int] = {}
    lacks: list[str] = []
    numbers: dict[str, float] = {}


class Card(BaseModel):
    """The fields of card.json that a page shows; others are ignored."""

    source: list[str] = []
    records: int = 0
    quarantine: dict[str, int] = {}
    duplicates: dict[str, int] = {}
    sides: dict[str, CardSide] = {}

    model_config = ConfigDict(from_attributes=True)


def data_section(data: DataRecord, card: Card, most_labels: int | None = None) -> dict[str, Any]:
    """Return sides, quarantine, duplicates, lengths and labels.

    Args:
        most_labels: how many labels are shown, the most frequent ones; None for all.
    """
    used = sum(side.documents for side in data.sides.values())
    sides = {name: card.sides.get(name, CardSide()) for name in _SIDES if name in data.sides}
    labels = _total(side.labels for side in sides.values())
    meanings = DEFECTS | SET_ASIDE
    return {
        "fingerprint": data.fingerprint,
        "source": ", ".join(card.source),
        "records": card.records,
        "used": used,
        "duplicates": sum(card.duplicates.values()),
        "folder": data.folder,
        "columns": _COLUMNS,
        "sides": [(name, _side(data.sides[name], side, used)) for name, side in sides.items()],
        "quarantine": [
            (
                reason,
                [number(count), percent(count / max(1, card.records)), meanings.get(reason, "")],
            )
            for reason, count in card.quarantine.items()
        ],
        "lengths": list(_lengths(card)),
        "labels": [
            (
                label,
                [
                    *(number(side.labels.get(label, 0)) for side in sides.values()),
                    percent(count / labels.total()),
                ],
                count,
            )
            for label, count in labels.most_common(most_labels)
        ],
        "labels_left_out": max(0, len(labels) - (most_labels or len(labels))),
        "label_notes": list(_label_notes(sides)),
        "side_names": list(sides),
        "number_names": list(sides["train"].numbers) if "train" in sides else [],
        "numbers": [
            (name, list(map(number, side.numbers.values())))
            for name, side in sides.items()
            if side.numbers
        ],
    }


def _total(counts: Any) -> Counter[Any]:
    total = Counter[Any]()
    for one in counts:
        total.update(one)
    return total


def _side(side: SideRecord, card: CardSide, used: int) -> list[str]:
    return [
        number(side.documents),
        percent(side.documents / max(1, used)),
        f"{card.bytes / 1e6:,.2f}" if card.bytes else "",
        number(side.rows),
        number(side.tokens),
        number(side.target_tokens),
        "" if card.target_share is None else percent(card.target_share),
        percent(card.fill) if card.fill else "",
        number(card.truncated),
        number(card.windowed),
    ]


def _lengths(card: Card) -> Iterator[tuple[str, list[str], int]]:
    """Yield the number of documents by length in tokens, all sides together."""
    totals = _total(
        {(low, high): count for low, high, count in side.lengths} for side in card.sides.values()
    )
    for (low, high), count in sorted(totals.items()):
        yield f"{number(low)} to {number(high)}", [number(count)], count


def _label_notes(sides: Mapping[str, CardSide]) -> Iterator[str]:
    for name, side in sides.items():
        if side.lacks:
            yield f"The {name} side lacks {listed(side.lacks)}."
    for name, side in sides.items():
        if side.label_counts:
            counts = (
                f"{records:,} records with {labels or 'no'} {'label' if labels == 1 else 'labels'}"
                for labels, records in side.label_counts.items()
            )
            yield f"{name}: {', '.join(counts)}"
