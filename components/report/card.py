"""The data card for the page, built from the preprocess step's record and card.json."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

from markupsafe import Markup
from pydantic import BaseModel, ValidationError

from steadytrain.components.pages.charts import histogram
from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.quantities import number, percent
from steadytrain.components.shared.records import DataRecord, Side, SideRecord

SHOWN_LABELS = 25


class _Side(BaseModel):
    """The fields of a side in card.json that the page needs."""

    fill: float = 0.0
    lengths: list[tuple[int, int, int]] = []
    truncated: int = 0
    labels: dict[str, int] = {}
    numbers: dict[str, float] = {}


class _Card(BaseModel):
    """The fields of card.json that the page needs; others are ignored."""

    source: list[str] = []
    records: int = 0
    quarantine: dict[str, int] = {}
    duplicates: dict[str, int] = {}
    sides: dict[str, _Side] = {}


def data_section(facts: Facts) -> dict[str, Any] | None:
    """Return sides, quarantine, duplicates, lengths and labels.

    None means that there is no data record yet.
    """
    if facts.data is None:
        return None
    card = _read(facts)
    used = sum(side.documents for side in facts.data.sides.values())
    return {
        "fingerprint": facts.data.fingerprint,
        "source": ", ".join(card.source),
        "records": card.records,
        "used": used,
        "duplicates": sum(card.duplicates.values()),
        "folder": facts.data.folder,
        "sides": [
            _side(name, side, card.sides.get(name, _Side()), used)
            for name, side in _in_order(facts.data)
        ],
        "quarantine": [
            (reason.replace("_", " "), number(count), percent(count / max(1, card.records)))
            for reason, count in card.quarantine.items()
        ],
        "lengths": _lengths(card),
        **_labels(card, facts.data),
        "number_names": [*card.sides.get("train", _Side()).numbers],
        "numbers": [
            (name, [number(value) for value in side.numbers.values()])
            for name, side in card.sides.items()
            if side.numbers
        ],
    }


def _in_order(data: DataRecord) -> list[tuple[Side, SideRecord]]:
    return [(name, data.sides[name]) for name in get_args(Side) if name in data.sides]


def _read(facts: Facts) -> _Card:
    try:
        return _Card.model_validate(facts.card or {})
    except ValidationError as error:
        facts.unreadable.append(f"card.json: {error.error_count()} fields are not as expected")
        return _Card()


def _side(name: str, side: SideRecord, card: _Side, used: int) -> tuple[str, list[str]]:
    values = [
        number(side.documents),
        percent(side.documents / max(1, used)),
        number(side.rows),
        number(side.tokens),
        number(side.target_tokens),
        percent(card.fill) if card.fill else "",
        number(card.truncated),
    ]
    return name, values


def _lengths(card: _Card) -> Markup:
    totals: Counter[tuple[int, int]] = Counter()
    for side in card.sides.values():
        for low, high, count in side.lengths:
            totals[low, high] += count
    bins = [
        (number(low), f"{number(low)} to {number(high)} tokens", count)
        for (low, high), count in sorted(totals.items())
    ]
    return histogram("Documents by length", bins, unit="tokens, at least")


def _labels(card: _Card, data: DataRecord) -> dict[str, Any]:
    """Return the record counts of each label by side, most frequent label first.

    Also return how many labels are left out and the names of the sides.
    """
    totals: Counter[str] = Counter()
    for side in card.sides.values():
        totals.update(side.labels)
    everything = max(1, totals.total())
    most = max(totals.values(), default=1)
    rows = [
        {
            "label": label,
            "counts": [
                number(card.sides.get(name, _Side()).labels.get(label, 0))
                for name, _ in _in_order(data)
            ],
            "share": percent(count / everything),
            "percent": round(100 * count / most, 1),
        }
        for label, count in totals.most_common(SHOWN_LABELS)
    ]
    return {
        "labels": rows,
        "labels_left_out": len(totals) - len(rows),
        "side_names": [name for name, _ in _in_order(data)],
    }
