"""The data card: a summary of the prepared data, as plain data and as an HTML page."""

from __future__ import annotations

import dataclasses
import html
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.preprocess.prepare import SideCounts
from steadytrain.components.preprocess.rendering import Document
from steadytrain.components.shared.class_names import listed
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.controls import without_controls
from steadytrain.components.shared.left_out import LEFT_OUT, SET_ASIDE
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tasks.encoding.fields import DEFECTS

_ORDER: tuple[Side, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class SampleCard:
    """A record: the beginning of its content, and its first row as the model sees it."""

    id: str
    text: str
    label: str | None
    row: list[Document]


@dataclass(frozen=True)
class SideCard:
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

    documents: int
    bytes: int
    rows: int
    tokens: int
    target_tokens: int
    target_share: float | None
    fill: float
    lengths: list[list[int]]
    truncated: int
    windowed: int
    skipped_windows: int
    labels: dict[str, int]
    label_counts: dict[int, int]
    lacks: list[str]
    numbers: dict[str, float]
    samples: list[SampleCard]


@dataclass(frozen=True)
class DataCard:
    """The full data set.

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
    """

    fingerprint: str
    task: str
    source: list[str]
    sequence_length: int
    trained_tokenizer: bool
    left_out: dict[str, int]
    detected: dict[str, int]
    layouts: dict[str, int]
    unused: dict[str, int]
    records: int
    defective: int
    duplicates: dict[str, int]
    near_duplicate_threshold: float | None
    quarantine: dict[str, int]
    unread_keys: dict[str, int]
    unprinted_keys: dict[str, int]
    warnings: list[str]
    sides: dict[Side, SideCard]

    @classmethod
    def of(
        cls,
        record: DataRecord,
        *,
        source: list[str],
        left_out: Mapping[str, int],
        detected: Mapping[str, int],
        layouts: Mapping[str, int],
        unused: Counter[str],
        records: int,
        counts: Mapping[Side, SideCounts],
        numbers: Mapping[Side, Mapping[str, float]],
        quarantine: Counter[str],
        unread: Mapping[str, int],
        unprinted: Mapping[str, int],
        warnings: list[str],
        near_duplicate_threshold: float | None,
        trained_tokenizer: bool,
        documents: Callable[[Mapping[str, Any]], list[Document]] | None,
        marked: bool,
    ) -> DataCard:
        """Return the card of prepared data.

        Args:
            documents: returns the documents of a row; None if rows are not tokens.
            marked: whether rows say which of their tokens are targets.
        """
        return cls(
            fingerprint=record.fingerprint,
            task=record.task,
            source=source,
            sequence_length=record.sequence_length,
            trained_tokenizer=trained_tokenizer,
            left_out=dict(left_out),
            detected=dict(detected),
            layouts=dict(layouts),
            unused=dict(unused.most_common()),
            records=records,
            defective=sum(quarantine[reason] for reason in DEFECTS),
            duplicates={reason: quarantine[reason] for reason in LEFT_OUT},
            near_duplicate_threshold=near_duplicate_threshold,
            quarantine=dict(quarantine.most_common()),
            unread_keys=dict(unread),
            unprinted_keys=dict(unprinted),
            warnings=warnings,
            sides={
                side: _side(
                    record, side, counts[side], numbers.get(side, {}), documents, marked=marked
                )
                for side in _ORDER
            },
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the card as plain data."""
        return dataclasses.asdict(self)


def _side(
    record: DataRecord,
    side: Side,
    counts: SideCounts,
    numbers: Mapping[str, float],
    documents: Callable[[Mapping[str, Any]], list[Document]] | None,
    *,
    marked: bool,
) -> SideCard:
    prepared = record.sides[side]
    places = prepared.rows * record.sequence_length
    return SideCard(
        documents=counts.documents,
        bytes=counts.bytes,
        rows=prepared.rows,
        tokens=prepared.tokens,
        target_tokens=prepared.target_tokens,
        target_share=round(counts.predicted / max(1, prepared.tokens), 4) if marked else None,
        fill=round(prepared.tokens / places, 4) if places else 0.0,
        lengths=[[2**n, 2 ** (n + 1) - 1, counts.lengths[n]] for n in sorted(counts.lengths)],
        truncated=counts.truncated,
        windowed=counts.windowed,
        skipped_windows=counts.skipped,
        labels=dict(counts.labels.most_common()),
        label_counts={} if {*counts.classes} <= {1} else dict(sorted(counts.classes.items())),
        lacks=[label for label in record.labels if not counts.labels[label]],
        numbers=dict(numbers),
        samples=[
            SampleCard(
                one.id,
                redact(one.text),
                one.label,
                documents(one.values) if documents and one.values else [],
            )
            for one in counts.samples
        ],
    )


def card_html(card: DataCard, told: str) -> str:
    """Return the card as one self-contained page.

    Args:
        told: what became of the records, in one line.
    """
    sections = [
        _section("Split", _split_table(card)),
        _section("Document lengths", _lengths(card)),
        _section("Not used", _quarantine_table(card)),
    ]
    if any(side.labels for side in card.sides.values()):
        sections.append(_section("Labels", _label_table(card)))
    if any(side.numbers for side in card.sides.values()):
        sections.append(_section("Numbers to predict", _number_table(card)))
    sections.append(_section("Samples", _samples(card)))
    return _PAGE.format(
        style=_STYLE,
        source=html.escape(", ".join(card.source)),
        task=html.escape(card.task),
        left_out=_counted(card.left_out),
        detected=_counted(card.detected),
        told=html.escape(told),
        warnings=html.escape("; ".join(map(without_controls, card.warnings)) or "none"),
        layouts=_counted(card.layouts),
        unused=_counted(card.unused),
        near=card.near_duplicate_threshold or "not searched",
        tokenizer=_tokenizer(card),
        fingerprint=html.escape(card.fingerprint),
        sections="\n".join(sections),
    )


def _counted(counts: Mapping[str, int]) -> str:
    return html.escape(", ".join(f"{count:,} {what}" for what, count in counts.items()) or "none")


def _tokenizer(card: DataCard) -> str:
    if not card.sequence_length:
        return "none"
    origin = "trained on the training side" if card.trained_tokenizer else "the model's own"
    return f"{origin}</dd><dt>sequence length</dt><dd>{card.sequence_length:,} tokens"


def _split_table(card: DataCard) -> str:
    told = ("in the loss", "targets", "filled", "cut", "in windows")
    heads = ("", "records", "MB of text", "sequences", "tokens", *told)
    rows = [
        (
            side,
            f"{part.documents:,}",
            f"{part.bytes / 1e6:,.2f}",
            f"{part.rows:,}",
            f"{part.tokens:,}",
            f"{part.target_tokens:,}",
            "" if part.target_share is None else f"{part.target_share:.1%}",
            f"{part.fill:.1%}",
            f"{part.truncated:,}",
            f"{part.windowed:,}",
        )
        for side, part in card.sides.items()
    ]
    return _table(heads, rows)


def _quarantine_table(card: DataCard) -> str:
    if not card.quarantine:
        return "<p>Every record is used.</p>"
    meanings = DEFECTS | SET_ASIDE
    rows = [
        (reason, meanings[reason], f"{count:,}", f"{count / card.records:.2%}")
        for reason, count in card.quarantine.items()
    ]
    note = "<p>Each of them is in quarantine.jsonl, with its source, line and reason.</p>"
    return _table(("reason", "meaning", "records", "share"), rows, words=2) + note


def _label_table(card: DataCard) -> str:
    totals: Counter[str] = Counter()
    for side in card.sides.values():
        totals.update(side.labels)
    most = max(totals.values())
    rows = [
        (label, [card.sides[side].labels.get(label, 0) for side in _ORDER], count)
        for label, count in totals.most_common()
    ]
    body = "".join(
        f"<tr><td>{html.escape(label)}</td>"
        + "".join(f"<td>{count:,}</td>" for count in by_side)
        + f'<td class="bar"><i style="width:{100 * count / most:.1f}%"></i></td></tr>'
        for label, by_side, count in rows
    )
    heads = "".join(f"<th>{name}</th>" for name in ("label", *_ORDER, ""))
    lacks = "".join(
        f"<p>The {side} side lacks {html.escape(listed(part.lacks))}.</p>"
        for side, part in card.sides.items()
        if part.lacks
    )
    sizes = "".join(
        f"<p>{side}: {', '.join(_with_labels(*item) for item in part.label_counts.items())}</p>"
        for side, part in card.sides.items()
        if part.label_counts
    )
    return f"<table><tr>{heads}</tr>{body}</table>{lacks}{sizes}"


def _with_labels(labels: int, records: int) -> str:
    return f"{records:,} records with {labels or 'no'} {'label' if labels == 1 else 'labels'}"


def distribution(numbers: NDArray[np.float64]) -> dict[str, float]:
    """Return what describes numbers, of which there is at least one."""
    shares = {"5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95}
    quantiles = np.quantile(numbers, [*shares.values()]).tolist()
    return {
        "min": float(numbers.min()),
        **dict(zip(shares, quantiles, strict=True)),
        "max": float(numbers.max()),
        "mean": float(numbers.mean()),
        "deviation": float(numbers.std()),
    }


def _number_table(card: DataCard) -> str:
    heads = ("", *card.sides["train"].numbers)
    rows = [
        (name, *(f"{value:,.6g}" for value in side.numbers.values()))
        for name, side in card.sides.items()
    ]
    return _table(heads, rows)


def _lengths(card: DataCard) -> str:
    """Return bars with the number of documents by length in tokens, all sides together."""
    totals: Counter[tuple[int, int]] = Counter()
    for side in card.sides.values():
        for low, high, count in side.lengths:
            totals[low, high] += count
    most = max(totals.values(), default=1)
    rows = "".join(
        f'<tr><td>{low:,} to {high:,} tokens</td><td>{count:,}</td><td class="bar">'
        f'<i style="width:{100 * count / most:.1f}%"></i></td></tr>'
        for (low, high), count in sorted(totals.items())
    )
    return f"<table><tr><th>length</th><th>records</th><th></th></tr>{rows}</table>"


def _samples(card: DataCard) -> str:
    note = "<p>The first row of each record, in tokens. Targets are <mark>marked</mark>.</p>"
    return note + "".join(
        f"<h3>{side}</h3>" + "".join(map(_sample, part.samples))
        for side, part in card.sides.items()
    )


def _sample(one: SampleCard) -> str:
    shown = [(document.name, _marked(document)) for document in one.row]
    label = "" if one.label is None else f"<p>label <mark>{html.escape(one.label)}</mark></p>"
    return label + "".join(
        f"<pre>{f'{name}: ' if name else ''}{text}</pre>"
        for name, text in shown or [("", html.escape(one.text))]
    )


def _marked(document: Document) -> str:
    texts = [(html.escape(without_controls(piece.text)), piece) for piece in document.pieces]
    return "".join(f"<mark>{text}</mark>" if piece.target else text for text, piece in texts)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """Return a table. The first `words` columns are text, the others numbers."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=word' if index < words else ''}>{html.escape(cell)}</td>"
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c2430;background:#fff;max-width:60rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
h3{font-size:.95rem;margin:1rem 0 .3rem;color:#5b6675}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:1rem 0}
dt{color:#5b6675}dd{margin:0;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}
th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid #e4e8ee;
font-variant-numeric:tabular-nums}
th{color:#5b6675;font-weight:600}th:first-child,td:first-child,.word{text-align:left}
td.bar{width:45%;text-align:left}td.bar i{display:block;height:.8rem;background:#3b6ea8;
min-width:1px;border-radius:2px}
pre{background:#f5f7fa;padding:.6rem .8rem;border-radius:4px;white-space:pre-wrap;
overflow-wrap:anywhere;font-size:.85rem;max-height:16rem;overflow:auto}
mark{background:#cfe6c4}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Data card</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>{style}</style></head>
<body><h1>Data card</h1>
<dl><dt>source</dt><dd>{source}</dd><dt>task</dt><dd>{task}</dd>
<dt>files left out</dt><dd>{left_out}</dd>
<dt>detected</dt><dd>{detected}</dd>
<dt>records</dt><dd>{told}</dd>
<dt>warnings</dt><dd>{warnings}</dd>
<dt>records of other layouts</dt><dd>{layouts}</dd>
<dt>columns not used</dt><dd>{unused}</dd>
<dt>near duplicates</dt><dd>data.near_duplicate_threshold: {near}</dd>
<dt>tokenizer</dt><dd>{tokenizer}</dd>
<dt>fingerprint</dt><dd><code>{fingerprint}</code></dd></dl>
{sections}
</body></html>
"""
