"""Adapt a pipeline's parameters to the data comparison, and its result to KFP artifacts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from steadytrain.components.detect_change.step import DataChange, run
from steadytrain.components.shared.config import from_parameters


def detect_change(*, parameters: Mapping[str, Any], page: dsl.HTML) -> bool:
    """Run the step.

    It writes nothing to the workspace, because a run may not follow.

    Returns:
        Whether to train again.
    """
    news = run(from_parameters(**parameters))
    print(news.reason)
    Path(page.path).write_text(_page(news), encoding="utf-8")
    page.metadata.update(
        reason=news.reason, **{f"{move.what}_shift": round(move.value, 4) for move in news.moves}
    )
    return news.found


def _page(news: DataChange) -> str:
    rows = "".join(
        f"<tr><td>{move.what}</td><td>{move.measure}</td><td>{move.value:.3f}</td>"
        f"<td>{move.limit:g}</td><td>{move.chance:.3f}</td></tr>"
        for move in news.moves
    )
    heads = "".join(f"<th>{name}</th>" for name in ("", "measure", "shift", "limit", "by chance"))
    table = f"<table><tr>{heads}</tr>{rows}</table>" if rows else ""
    return f"<p>{html.escape(news.reason)}</p>{table}"
