"""The data card: a summary of the prepared data, as plain data and as an HTML page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.pages.data_section import Card, data_section
from steadytrain.components.pages.html import html
from steadytrain.components.preprocess.prepare import SideCounts
from steadytrain.components.preprocess.rendering import Document
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.left_out import LEFT_OUT
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


def card_html(card: DataCard, record: DataRecord, told: str) -> str:
    """Return the card as one self-contained page.

    Args:
        record: of the same data.
        told: what became of the records, in one line.
    """
    tokens = "none"
    if card.sequence_length:
        origin = "trained on the training side" if card.trained_tokenizer else "the model's own"
        tokens = f"{origin}; sequences of {card.sequence_length:,} tokens"
    facts = {
        "task": card.task,
        "files left out": _counted(card.left_out),
        "detected": _counted(card.detected),
        "records": told,
        "warnings": "; ".join(card.warnings) or "none",
        "records of other layouts": _counted(card.layouts),
        "columns not used": _counted(card.unused),
        "near duplicates": "data.near_duplicate_threshold: "
        f"{card.near_duplicate_threshold or 'not searched'}",
        "tokenizer": tokens,
        "fingerprint": card.fingerprint,
    }
    return html(
        "card",
        kind="data",
        name="Data card",
        facts=facts.items(),
        data=data_section(record, Card.model_validate(card.as_dict())),
        sides=card.sides,
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items()) or "none"


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
