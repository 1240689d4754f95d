"""Adapt a pipeline's parameters to the data comparison, and its result to KFP artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from steadytrain.components.detect_change.step import run
from steadytrain.components.pages.html import html
from steadytrain.components.shared.config import from_parameters
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.workspace import DataCheck, Workspace, keep_data_check


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
        keep_data_check(workspace, job, DataCheck(failure=what | {"remedy": error.remedy}))
        raise
    keep_data_check(workspace, job, DataCheck(found=news.found, reason=news.reason))
    print(news.reason)
    moves = [
        (move.what, [move.measure, f"{move.value:.3f}", f"{move.limit:g}", f"{move.chance:.3f}"])
        for move in news.moves
    ]
    text = html("sentence", kind="data", name=config.name, sentence=news.reason, moves=moves)
    Path(page.path).write_text(text, encoding="utf-8")
    page.metadata.update(
        reason=news.reason, **{f"{move.what}_shift": round(move.value, 4) for move in news.moves}
    )
    return news.found
