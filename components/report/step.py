"""The report step: it runs last, whatever happened before, and never fails a run."""

from __future__ import annotations

from pathlib import Path

from steadytrain.components.report.facts import gather
from steadytrain.components.report.page import render
from steadytrain.components.report.spending import Spending
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.stage import stage
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.tracking import finish_run, log_artifacts


def run(config: RunConfig) -> Path:
    """Writes the page from what is in the run's folder, and ends the run in MLflow.

    Returns:
        The page's path.

    Raises:
        StorageError: the page cannot be written.
    """
    with stage(config, "report") as current:
        workspace = current.workspace
        facts = gather(workspace)
        page = workspace.report
        LocalStorage(page.parent).write(page.name, render(facts).encode())
        standing = outcome(facts)
        current.summary = standing.sentence
        log_artifacts(config, workspace)
        cut = facts.spans
        finish_run(
            config,
            workspace,
            standing.state == "finished",
            spent=Spending.of(facts).metrics(),
            moment=cut[-1].end if cut else 0.0,
        )
    return page
