"""Adapt a pipeline's parameters to the report step, and the report to a KFP artifact.

An exit handler cannot take artifacts from the steps before it. So it resolves the configuration
again from the same parameters, which gives the same run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from steadytrain.components.pages.html import html
from steadytrain.components.report.facts import gather
from steadytrain.components.report.sentences import as_line
from steadytrain.components.report.step import notify, run
from steadytrain.components.report.story import RunSummary, outcome, without_steps
from steadytrain.components.shared.config import from_parameters
from steadytrain.components.shared.workspace import Workspace


def report(*, parameters: Mapping[str, Any], page: dsl.HTML) -> None:
    """Write the report, end the run in MLflow, and call the webhook if one is configured.

    If no step of the run has started, for example because there was no new data, write only a note.
    The story is the last line of the log.
    """
    config = from_parameters(**parameters)
    workspace = Workspace.of(config)
    if not workspace.events.exists():
        print_story(without_steps(workspace, parameters["job"]), page)
        return
    try:
        shutil.copyfile(run(config, parameters["job"]), page.path)
    finally:
        notify(workspace)
        print(as_line(outcome(gather(workspace))))


def print_story(run_summary: RunSummary, page: dsl.HTML) -> None:
    """Write a page that is only the story of a run that has no folder, and print the story."""
    text = html("sentence", kind="run", name="Report", sentence=run_summary.sentence, moves=[])
    Path(page.path).write_text(text, encoding="utf-8")
    print(as_line(run_summary))
