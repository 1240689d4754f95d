"""The data card: a summary of the prepared data, as plain data and as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.pages.data_section import DataCard, SampleCard, SideCard, data_section
from steadytrain.components.pages.html import html
from steadytrain.components.preprocess.prepare import SideCounts
from steadytrain.components.preprocess.shown import Document
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.records import DataRecord, Side


def side_card(
    record: DataRecord,
    side: Side,
    counts: SideCounts,
    numbers: Mapping[Side, Mapping[str, float]],
    documents: Callable[[Mapping[str, Any]], list[Document]] | None,
    *,
    marked: bool,
) -> SideCard:
    """Return the card of one side.

    Args:
        documents: returns the documents of a row; None if rows are not tokens.
        marked: whether rows say which of their tokens are targets.
    """
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
        lengths=[(2**n, 2 ** (n + 1) - 1, counts.lengths[n]) for n in sorted(counts.lengths)],
        truncated=counts.truncated,
        windowed=counts.windowed,
        skipped_windows=counts.skipped,
        labels=dict(counts.labels.most_common()),
        label_counts={} if {*counts.classes} <= {1} else dict(sorted(counts.classes.items())),
        lacks=[label for label in record.labels if not counts.labels[label]],
        numbers=dict(numbers.get(side, {})),
        samples=[
            SampleCard(
                id=one.id,
                text=redact(one.text),
                label=one.label,
                row=documents(one.values) if documents and one.values else [],
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
        data=data_section(record, card),
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
