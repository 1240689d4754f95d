"""Pass KFP artifacts to the steps that drive a study, and turn their results into artifacts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfp import dsl

from steadytrain.components.report.artifacts import print_story
from steadytrain.components.report.facts import gather
from steadytrain.components.report.sentences import as_line
from steadytrain.components.report.story import outcome, without_steps
from steadytrain.components.shared.config import RunConfig, from_parameters, load
from steadytrain.components.shared.kubeflow.connection import run_tags
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.stage import start_run
from steadytrain.components.shared.tracking import run_links
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.artifacts import publish
from steadytrain.components.train.launch.own_pod import with_task
from steadytrain.components.train.recovery.takeover import hold_run
from steadytrain.components.tune.cross_validation import PREDICTIONS, results_of
from steadytrain.components.tune.cross_validation import SUMMARY as FOLDS
from steadytrain.components.tune.designs import (
    AS_IT_IS,
    as_cross_validation,
    is_cross_validation,
)
from steadytrain.components.tune.driver import study_folder
from steadytrain.components.tune.results import BEST, SUMMARY
from steadytrain.components.tune.step import conclude, run, run_cross_validation
from steadytrain.components.tune.step import train_winner as train_on_seeds
from steadytrain.components.tune.study import study_name
from steadytrain.components.tune.study_page import PAGE


def tune(
    *,
    resolved: dsl.Artifact,
    data: dsl.Dataset,
    best: dsl.Artifact,
    summary: dsl.Artifact,
    page: dsl.HTML,
    result: dsl.Metrics,
    task: dsl.TaskConfig | None,
) -> bool:
    """Run the tune step.

    Returns:
        Whether the winner is to be trained on fresh seeds.
    """
    config = with_task(load(Path(resolved.path)), task)
    study = run(config, DataRecord.load(Path(data.path)))
    folder = study_folder(config)
    for name, artifact in ((BEST, best), (SUMMARY, summary), (PAGE, page)):
        shutil.copyfile(folder / name, artifact.path)
    found = json.loads((folder / SUMMARY).read_bytes())
    best.metadata.update(study=found["study"], trial=found["best_trial"], **found["best_params"])
    result.log_metric(study.tune.objective.metric, found["best_score"])
    for name in ("trials", "trials_completed", "trials_failed", "steps", "seconds"):
        result.log_metric(name, found[name])
    return config.tune.seeds > 0


def cross_validate(
    *,
    parameters: Mapping[str, Any],
    summary: dsl.Artifact,
    predictions: dsl.Dataset,
    page: dsl.HTML,
    result: dsl.Metrics,
    task: dsl.TaskConfig | None,
) -> None:
    """Run the cross-validate step, the first of its pipeline."""
    stated = _of_study(from_parameters(**parameters))
    with hold_run(stated):
        start_run(stated, run_tags(str(parameters["job"])))
    config = with_task(stated, task)
    study = run_cross_validation(config)
    folder = study_folder(config)
    for name, artifact in ((FOLDS, summary), (PREDICTIONS, predictions), (PAGE, page)):
        shutil.copyfile(folder / name, artifact.path)
    for metric, mean in results_of(study, folder).means[AS_IT_IS].items():
        result.log_metric(metric, mean.mean)
    for name, value in (("runs", len(study.history.trials)), ("failed", study.history.failed)):
        result.log_metric(name, value)


def train_winner(
    *,
    resolved: dsl.Artifact,
    best: dsl.Artifact,
    summary: dsl.Artifact,
    winner: dsl.Artifact,
    data: dsl.Dataset,
    model: dsl.Model,
    result: dsl.Metrics,
    task: dsl.TaskConfig | None,
) -> None:
    """Run the step that trains the winner. Its outputs are those of the run with the best model."""
    searched = json.loads(Path(summary.path).read_bytes())
    found = train_on_seeds(
        load(Path(resolved.path)),
        with_task(load(Path(best.path)), task),
        # The trials of a search are its units.
        searched.get("compared", searched["trials"]),
    )
    config, workspace = found.config, Workspace.of(found.config)
    Path(winner.path).write_bytes(config.to_saved())
    winner.metadata.update(
        run=config.run_id, digest=config.digest(), **run_links(config, workspace)
    )
    shutil.copyfile(workspace.record("preprocess"), data.path)
    publish(config, found.trained[config.training.seed], model, result)
    result.log_metric("seed", config.training.seed)


def report(*, parameters: Mapping[str, Any], page: dsl.HTML) -> None:
    """Report on the study's run and on its winner's. The page is that of the study's run."""
    report_study(_of_study(from_parameters(**parameters)), parameters["job"], page)


def report_study(config: RunConfig, job: str, page: dsl.HTML) -> None:
    """Report on a study whose run has its name."""
    workspace = Workspace.of(config)
    if not workspace.events.exists():
        print_story(without_steps(workspace, job), page)
        return
    try:
        shutil.copyfile(conclude(config, job), page.path)
    finally:
        print(as_line(outcome(gather(workspace))))


def _of_study(config: RunConfig) -> RunConfig:
    """Return the configuration with the name of its study, as `submit` sends it."""
    whole = as_cross_validation(config) if is_cross_validation(config) else config
    return config.model_copy(update={"run": study_name(whole)})
