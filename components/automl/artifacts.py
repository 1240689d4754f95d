"""Pass KFP artifacts to the steps of a search, and turn their results into artifacts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from steadytrain.components.automl.results import BOARD
from steadytrain.components.automl.step import judge, named, run
from steadytrain.components.shared.config import from_parameters, load
from steadytrain.components.train.launch.own_pod import with_task
from steadytrain.components.tune.artifacts import report_study
from steadytrain.components.tune.driver import study_folder
from steadytrain.components.tune.results import BEST


def search(
    *,
    resolved: dsl.Artifact,
    study: dsl.Artifact,
    best: dsl.Artifact,
    board: dsl.Artifact,
    result: dsl.Metrics,
    task: dsl.TaskConfig | None,
) -> None:
    """Run the search step."""
    config = named(load(Path(resolved.path)))
    run(with_task(config, task))
    Path(study.path).write_bytes(config.to_saved())
    folder = study_folder(config)
    for name, artifact in ((BEST, best), (BOARD, board)):
        shutil.copyfile(folder / name, artifact.path)
    found = json.loads((folder / BOARD).read_bytes())
    best.metadata.update(study=found["study"], **found["best_params"])
    for name in ("best_score", "corrected_score", "compared", "trials_completed", "trials_failed"):
        result.log_metric(name, found[name])


def report(*, parameters: Mapping[str, Any], page: dsl.HTML) -> None:
    """Report on the search's run and on its winner's. The page is that of the search's run."""
    config = named(from_parameters(**parameters))
    try:
        judge(config)
    finally:
        report_study(config, parameters["job"], page)
