"""The steps that drive a study, train its winner, and conclude: clean up, and write the pages."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.components.preprocess.inputs import inputs_of
from steadytrain.components.report.facts import gather
from steadytrain.components.report.sentences import as_line
from steadytrain.components.report.step import notify, print_story, write_page
from steadytrain.components.report.step import run as report
from steadytrain.components.report.story import outcome, without_steps
from steadytrain.components.shared.config import RunConfig, from_parameters, load
from steadytrain.components.shared.errors import BadInput, SteadytrainError, StorageError
from steadytrain.components.shared.kubeflow.connection import run_tags
from steadytrain.components.shared.lease import is_held
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.stage import stage
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.tracking import run_links
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.own_pod import with_task
from steadytrain.components.train.launch.removal import (
    how_terminated,
    remove_unfinished,
    remove_unfinished_below,
    works_in,
)
from steadytrain.components.train.recovery.takeover import begin_run
from steadytrain.components.train.step import publish
from steadytrain.components.tune.cross_validation import (
    PREDICTIONS,
    checked_start,
    results_of,
    words,
    write_cross_validation,
)
from steadytrain.components.tune.cross_validation import SUMMARY as FOLDS
from steadytrain.components.tune.cross_validation import ending as ending_of_folds
from steadytrain.components.tune.designs import (
    AS_IT_IS,
    as_cross_validation,
    check_folds,
    is_automl,
    is_cross_validation,
)
from steadytrain.components.tune.driver import driving, lease_of, study_folder
from steadytrain.components.tune.log import open_log
from steadytrain.components.tune.results import BEST, SUMMARY, WINNER, Lines, best_config, ending
from steadytrain.components.tune.search import first_trials, search
from steadytrain.components.tune.study import (
    Study,
    check_inputs,
    check_space,
    logs_address,
    study_name,
)
from steadytrain.components.tune.study_page import PAGE
from steadytrain.components.tune.trials.folder import trials_of
from steadytrain.components.tune.trials.retrain import (
    Trained,
    fresh_seeds,
    named_after,
    on_seed,
    train_on,
)

if TYPE_CHECKING:
    from kfp import dsl


def best_of(study: Study) -> RunConfig:
    """Return the configuration of a study's best trial.

    Raises:
        SteadytrainError: no trial has finished.
    """
    config = best_config(study)
    if config is None:
        raise SteadytrainError(
            "no trial finished, so there is no best one",
            remedy="raise tune.budget and run the same command again: the study continues",
        )
    return config


def run(config: RunConfig, data: DataRecord | None = None) -> Study:
    """Run the tune step. Its lines go to the step's output.

    Args:
        data: prepared data. None means the output of this run's preprocess step.

    Raises:
        BadInput: `tune.space` is empty, or there is no data, or it is not that of `data.source`.
        RunBusy: another driver works on the study. This step then reports nothing.
        SteadytrainError: as for `search` and `best_of`.
    """
    with driving(config) as log, stage(config, "tune") as current:
        check_space(config)
        data = data or DataRecord.load(current.workspace.record("preprocess"))
        _check_source(config, data)
        first = partial(first_trials, config)
        study = search(config, log, Lines(_print), _print, first=first, data=data)
        best_of(study)
        current.summary = _print_ending(ending(study))
        return study


def _check_source(config: RunConfig, data: DataRecord) -> None:
    """Reject prepared data if this step reads other content: its pod, too, trains the winner.

    Raises:
        BadInput: the content differs.
    """
    if data.inputs_digest and data.inputs_digest != inputs_of(config).digest():
        raise BadInput(
            f"data.source = {', '.join(config.data.source)[:200]}: this step does not read what "
            "the preprocess step prepared, so its winner would train on other data",
            remedy="run the pipeline again, so that it prepares the data as they are now; for "
            "package:NAME, give both images the same version of the package",
        )


def run_cross_validation(config: RunConfig) -> Study:
    """Run the cross-validate step. Its lines go to the step's output.

    It prepares the data itself: only the folds of the data are needed, not the data as a whole.

    Raises:
        BadInput, ConfigError: see `check_folds`.
        DataError: the data of a new cross-validation cannot be divided. Nothing is in its log.
        RunBusy: another driver works on the study. This step then reports nothing.
        SteadytrainError: as for `search`, or no run has finished.
    """
    check_folds(config)
    config = as_cross_validation(config)
    with driving(config) as log, stage(config, "cross-validate") as current:
        lines = Lines(_print, words(config))
        first = partial(checked_start, config)
        study = search(config, log, lines, _print, write=write_cross_validation, first=first)
        results = results_of(study, study_folder(config))
        _print_ending(ending_of_folds(study, results))
        if not results.folds:
            raise SteadytrainError(
                "no run finished, so no fold has scores",
                remedy="raise tune.budget, or fix what the failed runs name, and run the same "
                "command again: the study continues",
            )
        current.summary = (
            f"{len(results.folds)} of {study.tune.budget.trials} runs are scored, on "
            f"{config.cross_validation.splits} folds"
        )
        return study


def train_on_seeds(config: RunConfig, best: RunConfig, compared: int) -> Trained:
    """Run the step that trains a study's best configuration on fresh seeds.

    Args:
        config: of the study.
        best: of its best trial.
        compared: number of configurations that the study compared.

    Raises:
        BadInput: the data are not those that the study began with.
        TrainingFailed: training failed on every seed.
    """
    with stage(config, "winner") as current:
        opened = next(iter(open_log(logs_address(config), study_name(config)).read()), {})
        if known := str(opened.get("inputs", "")):
            check_inputs(config, known, inputs_of(config).digest())
        result = train_on(
            named_after(config, best),
            _seeds(config, best),
            compared=compared,
            greater_is_better=config.tune.objective.direction == "maximize",
        )
        LocalStorage(study_folder(config)).write(WINNER, result.config.to_saved())
        record = result.trained[result.config.training.seed]
        current.summary = (
            f"run {result.config.run_id} with seed {result.config.training.seed} is the best of "
            f"{len(result.trained)}: {record.metric} {record.best_score:.4g}"
        )
        return result


def conclude(config: RunConfig, job: str = "") -> Path:
    """Remove jobs that a lost step left, and report on the study's run and on its winner's.

    If a step was lost, the pipeline is submitted again. If another driver works on the study, this
    pipeline run was a second one and was refused, so only its page is written.

    Args:
        job: KFP's id of the run; "" if this is not a step of a pipeline.

    Returns:
        The path of the page of the study's run.

    Raises:
        StorageError: the page cannot be written.
    """
    workspace, folder = Workspace.of(config), study_folder(config)
    problems, driven, progress = _cleaned_up(config, job)
    if driven:
        write_page(workspace)
        return workspace.report
    for run in _runs_on_seeds(config):
        problems += remove_unfinished(run, job)
    for problem in problems:
        print(f"not removed: {problem}", file=sys.stderr)
    page = _reported(config, job, progress=progress)
    if (folder / WINNER).is_file():
        # A pipeline run is resubmitted at most once: by the search or by the run of its winner.
        finished = outcome(gather(workspace)).state == "finished"
        _reported(load(folder / WINNER), job if finished else "")
    return page


def _cleaned_up(config: RunConfig, job: str) -> tuple[list[str], bool, int]:
    """Remove the jobs of trials that nobody supervises any more.

    Returns:
        What could not be removed; whether a driver works on the study; and how much its log holds.
    """
    try:
        lease = lease_of(config)
        problems = remove_unfinished_below(config, trials_of(study_folder(config)), lease, job)
        log = open_log(logs_address(config), study_name(config))
        stopped = bool(job and how_terminated()) and works_in(lease, job)
        return problems, is_held(lease) and not stopped, len(log.read())
    except (BadInput, StorageError) as error:
        # The pages still show why the study stopped.
        return [error.message], False, 0


def _reported(config: RunConfig, job: str, *, progress: int | None = None) -> Path:
    try:
        return report(config, job, progress=progress)
    finally:
        notify(Workspace.of(config))


def _runs_on_seeds(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the runs that train the best configuration again, as far as they have begun."""
    best_folder = study_folder(config) / BEST
    if not best_folder.is_file():
        return
    best = named_after(config, load(best_folder))
    for seed in _seeds(config, best):
        run = on_seed(best, seed, compared=0)
        if Workspace.of(run).events.exists():
            yield run


def _seeds(config: RunConfig, best: RunConfig) -> Sequence[int]:
    """Return the seeds that train the winner: what a search found trains once, as it is."""
    return [best.training.seed] if is_automl(config) else fresh_seeds(best, config.tune.seeds)


def _print_ending(lines: Sequence[str]) -> str:
    """Print the ending of a study, and return it in one line."""
    for line in lines:
        _print(line)
    return "; ".join(" ".join(line.split()) for line in lines if line)


def _print(line: str) -> None:
    print(line, flush=True)


def kfp_tune(
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
    content = json.loads((folder / SUMMARY).read_bytes())
    trial, params = content["best_trial"], content["best_params"]
    best.metadata.update(study=content["study"], trial=trial, **params)
    result.log_metric(study.tune.objective.metric, content["best_score"])
    for name in ("trials", "trials_completed", "trials_failed", "steps", "seconds"):
        result.log_metric(name, content[name])
    return config.tune.seeds > 0


def kfp_cross_validate(
    *,
    summary: dsl.Artifact,
    predictions: dsl.Dataset,
    page: dsl.HTML,
    result: dsl.Metrics,
    task: dsl.TaskConfig | None,
    **parameters: Any,
) -> None:
    """Run the cross-validate step, the first of its pipeline."""
    stated = _of_study(from_parameters(**parameters))
    begin_run(stated, run_tags(str(parameters["job"])))
    config = with_task(stated, task)
    study = run_cross_validation(config)
    folder = study_folder(config)
    for name, artifact in ((FOLDS, summary), (PREDICTIONS, predictions), (PAGE, page)):
        shutil.copyfile(folder / name, artifact.path)
    for metric, mean in results_of(study, folder).means[AS_IT_IS].items():
        result.log_metric(metric, mean.mean)
    for name, value in (("runs", len(study.history.trials)), ("failed", study.history.failed)):
        result.log_metric(name, value)


def kfp_train_winner(
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
    trained = train_on_seeds(
        load(Path(resolved.path)),
        with_task(load(Path(best.path)), task),
        # The trials of a search are its units.
        searched.get("compared", searched["trials"]),
    )
    config, workspace = trained.config, Workspace.of(trained.config)
    Path(winner.path).write_bytes(config.to_saved())
    winner.metadata.update(
        run=config.run_id, digest=config.digest(), **run_links(config, workspace)
    )
    shutil.copyfile(workspace.record("preprocess"), data.path)
    publish(config, trained.trained[config.training.seed], model, result)
    result.log_metric("seed", config.training.seed)


def kfp_report(*, page: dsl.HTML, **parameters: Any) -> None:
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
