"""From a pipeline's parameters to the report, and from the report to a KFP artifact.

An exit handler can take no artifact of the steps before it, so it resolves the
configuration anew from the same parameters, which gives the same run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from steadytrain.components.report.notify import notify
from steadytrain.components.report.step import run
from steadytrain.components.shared.config import from_parameters
from steadytrain.components.shared.workspace import Workspace


def report(*, parameters: Mapping[str, Any], page: dsl.HTML) -> None:
    """Writes the report, closes the run's tracking, and calls the webhook where there is one.

    Of a run that nothing has begun, since there was nothing new, there is nothing to tell.
    """
    config = from_parameters(**parameters)
    workspace = Workspace.of(config)
    if not workspace.events.exists():
        Path(page.path).write_text("<p>No step of the run has begun.</p>", encoding="utf-8")
        return
    try:
        shutil.copyfile(run(config, parameters["job"]), page.path)
    finally:
        notify(workspace)
