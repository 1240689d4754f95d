"""The prepared data as tables: for the data card, and for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel

from steadytrain.components.pages.charts import spark_bars
from steadytrain.components.shared.class_names import listed
from steadytrain.components.shared.left_out import SET_ASIDE
from steadytrain.components.shared.quantities import number, percent
from steadytrain.components.shared.records import DataRecord, Side, SideRecord
from steadytrain.components.tasks.encoding.fields import DEFECTS
from steadytrain.components.techniques.mixture import Drawn

_SIDES = get_args(Side)
_COLUMNS = (
    *("Documents", "Share", "MB of text", "Sequences", "Tokens"),
    *("In the loss", "Targets", "Filled", "Cut", "In windows"),
)
_MIXTURE_COLUMNS = (
    *("Documents", "Rows", "Tokens", "Share of tokens"),
    *("Planned share", "Realized share", "Rows learned", "Passes"),
)

MOST_COLUMNS: Final = 200
"""Columns of a table that a page shows."""


class SampleCard(BaseModel):
    """A record: the beginning of its content, and its first row as the model sees it.

    picture: the address of what an image looks like; "" for other data.
    """

    id: str = ""
    text: str
    picture: str = ""
    label: str | None = None
    row: list[Any] = []


class SideCard(BaseModel):
    """One side of the split.

    target_share: share of the tokens that are targets; None if no row says which are.
    fill: share of token positions in the sequences that are filled; 0 if there are no tokens.
    lengths: documents by number of tokens, as [from, to, count].
    truncated: records cut to the sequence length.
    windowed: records that data.long_records put into windows.
    skipped_windows: windows with nothing to predict.
    label_counts: records by their number of labels, if that is not always one.
    lacks: classes without a record on this side.
    numbers: distribution of the numbers to predict; empty if records have none.
    """

    documents: int = 0
    bytes: int = 0
    rows: int = 0
    tokens: int = 0
    target_tokens: int = 0
    target_share: float | None = None
    fill: float = 0.0
    lengths: list[tuple[int, int, int]] = []
    truncated: int = 0
    windowed: int = 0
    skipped_windows: int = 0
    labels: dict[str, int] = {}
    label_counts: dict[int, int] = {}
    lacks: list[str] = []
    numbers: dict[str, float] = {}
    samples: list[SampleCard] = []


class DataCard(BaseModel):
    """The full data set, as in card.json. Fields that an older card lacks have their defaults.

    left_out: files that are not data, by kind.
    detected: number of files by what was found out about them, such as their delimiter.
    layouts: number of good records by the layout that was detected, such as Alpaca.
    unused: number of good records by column with text that nothing reads.
    records: number of records read, used or not.
    near_duplicate_threshold: `data.near_duplicate_threshold`; None if near duplicates are not
        searched.
    unread_keys: number of messages with each key that nothing reads.
    unprinted_keys: number of messages with each key that the chat template does not print.
    warnings: what was noticed about the data.
    columns: what the columns of a table are, as `tabular.columns.Column`; empty for other data.
    facts: what else the training side has in common, by name.
    """

    fingerprint: str = ""
    task: str = ""
    source: list[str] = []
    sequence_length: int = 0
    trained_tokenizer: bool = False
    left_out: dict[str, int] = {}
    detected: dict[str, int] = {}
    layouts: dict[str, int] = {}
    unused: dict[str, int] = {}
    records: int = 0
    defective: int = 0
    duplicates: dict[str, int] = {}
    near_duplicate_threshold: float | None = None
    quarantine: dict[str, int] = {}
    unread_keys: dict[str, int] = {}
    unprinted_keys: dict[str, int] = {}
    warnings: list[str] = []
    columns: list[dict[str, Any]] = []
    facts: dict[str, str] = {}
    sides: dict[str, SideCard] = {}


def data_section(
    data: DataRecord,
    card: DataCard,
    most_labels: int | None = None,
    drawn: Sequence[Drawn] = (),
) -> dict[str, Any]:
    """Return sides, quarantine, duplicates, lengths and labels.

    Args:
        most_labels: how many labels are shown, the most frequent ones; None for all.
        drawn: what training drew of each data set of a mixture; empty before it.
    """
    used = sum(side.documents for side in data.sides.values())
    sides = {name: card.sides.get(name, SideCard()) for name in _SIDES if name in data.sides}
    labels = _total(side.labels for side in sides.values())
    # A record may have several labels, or none.
    labeled = used if any(side.label_counts for side in sides.values()) else labels.total()
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
        "mixture_columns": _MIXTURE_COLUMNS[: None if drawn else 4],
        "mixture": list(_mixture(data.sides["train"], drawn)) if "train" in data.sides else [],
        "quarantine": [
            (
                reason,
                [number(count), percent(count / max(1, card.records)), meanings.get(reason, "")],
            )
            for reason, count in card.quarantine.items()
        ],
        "table": [
            (
                column["name"],
                [
                    column["kind"] or f"not learned from: {column['reason']}",
                    percent(column["missing"]),
                    number(column["distinct"]),
                    spark_bars(column.get("histogram", []), column.get("low"), column.get("high")),
                    "; ".join(map(number, column.get("quantiles", []))),
                    ", ".join(column["examples"]),
                ],
            )
            for column in card.columns[:MOST_COLUMNS]
        ],
        "table_columns": len(card.columns),
        "facts": card.facts,
        "lengths": list(_lengths(card)),
        "labels": [
            (
                label,
                [
                    *(number(side.labels.get(label, 0)) for side in sides.values()),
                    percent(count / max(1, labeled)),
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


def _mixture(side: SideRecord, drawn: Sequence[Drawn]) -> Iterator[tuple[str, list[str]]]:
    """Yield each data set of a mixture: what there is of it, and what was learned of it."""
    learned = {one.name: one for one in drawn}
    for source in side.sources:
        cells = [number(source.documents), number(source.rows), number(source.tokens)]
        cells.append(percent(source.tokens / max(1, side.tokens)))
        if (one := learned.get(source.name)) is not None:
            cells += [percent(one.planned), percent(one.realized), number(one.rows)]
            cells.append(f"{one.passes:.2f}")
        yield source.name, cells


def _total(counts: Any) -> Counter[Any]:
    total = Counter[Any]()
    for one in counts:
        total.update(one)
    return total


def _side(side: SideRecord, card: SideCard, used: int) -> list[str]:
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


def _lengths(card: DataCard) -> Iterator[tuple[str, list[str], int]]:
    """Yield the number of documents by length in tokens, all sides together."""
    totals = _total(
        {(low, high): count for low, high, count in side.lengths} for side in card.sides.values()
    )
    for (low, high), count in sorted(totals.items()):
        yield f"{number(low)} to {number(high)}", [number(count)], count


def _label_notes(sides: Mapping[str, SideCard]) -> Iterator[str]:
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
