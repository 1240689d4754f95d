"""Adapt a pipeline's parameters to the data comparison, and its result to KFP artifacts."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from steadytrain.components.detect_change.step import DataChange, run
from steadytrain.components.shared.config import from_parameters
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.data_check import DataCheck, keep
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.workspace import Workspace


def detect_change(*, parameters: Mapping[str, Any], page: dsl.HTML) -> bool:
    """Run the step.

    It writes nothing to the run's folder, because a run may not follow. The report of this pipeline
    run finds its result elsewhere.

    Returns:
        Whether to train again.
    """
    config, job = from_parameters(**parameters), str(parameters["job"])
    workspace = Workspace.of(config)
    try:
        news = run(config)
    except SteadytrainError as error:
        what = {"error": type(error).__name__, "message": redact(error.message)}
        keep(workspace, job, DataCheck(failure=what | {"remedy": error.remedy}))
        raise
    keep(workspace, job, DataCheck(found=news.found, reason=news.reason))
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
