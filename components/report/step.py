"""The report step: it runs last, whatever happened before, and never fails a run."""

from __future__ import annotations

from pathlib import Path

from steadytrain.components.report.facts import Facts, gather
from steadytrain.components.report.page import render
from steadytrain.components.report.resubmit import resubmit
from steadytrain.components.report.spending import Spending
from steadytrain.components.report.story import outcome
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.stage import stage
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.tracking import finish_run, log_artifacts
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.removal import remove_unfinished
from steadytrain.components.train.lease import held


def write_page(workspace: Workspace) -> Facts:
    """Writes the page, and nothing else of the run: it may be another's at this moment.

    Raises:
        StorageError: the page cannot be written.
    """
    facts = gather(workspace)
    LocalStorage(workspace.report.parent).write(workspace.report.name, render(facts).encode())
    return facts


def run(config: RunConfig, job: str = "") -> Path:
    """Looks after what a lost step has left, writes the page, and ends the run in MLflow.

    Its jobs are removed, and where there was one the pipeline is submitted again. Of a run that
    another supervisor trains, since a second pipeline was refused, only the page is written.

    Args:
        job: KFP's id of the run; "" where it is not a step of a pipeline.

    Returns:
        The page's path.

    Raises:
        StorageError: the page cannot be written.
    """
    # Waits for the lease of a lost supervisor; whose lease is held after that trains the run.
    problems, workspace = remove_unfinished(config, job), Workspace.of(config)
    if held(LocalStorage(workspace.lease)):
        write_page(workspace)
        return workspace.report
    with stage(config, "report") as current:
        for problem in problems:
            current.emit(Warned(stage="report", message=f"not removed: {problem}"))
        if told := resubmit(config, job):
            current.emit(told)
        facts = write_page(workspace)
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
    return workspace.report
