"""The data card, arranged for the page: from the record, and from card.json where it is there."""

from __future__ import annotations

from typing import Any

from steadytrain.components.report.charts import histogram
from steadytrain.components.report.facts import Facts
from steadytrain.components.report.words import number, percent


def data_section(facts: Facts) -> dict[str, Any] | None:
    """Sides, quarantine, duplicates, lengths, labels."""
    if facts.data is None:
        return None
    documents = sum(side.documents for side in facts.data.sides.values()) or 1
    card = facts.card or {}
    return {
        "fingerprint": facts.data.fingerprint,
        "sides": [
            {
                "name": name,
                "documents": number(side.documents),
                "share": percent(side.documents / documents),
                "rows": number(side.rows),
                "tokens": number(side.tokens),
                "targets": number(side.target_tokens),
            }
            for name, side in facts.data.sides.items()
        ],
        "card": card,
    }
