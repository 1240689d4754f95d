"""Run a study until it is complete, as the commands `tune` and `ablate` and the tune step do.

It first counts the steps of a full trial if the configuration gives epochs, and it begins with
parameters that are known to work.

On a cluster, the ranks of trials are in pods. A trial is supervised by a process of its own next to
the driver, as on one machine. Its ranks are a job on the cluster, created, followed and removed as
for any run. So a trial that pauses, ends or is stopped frees its nodes at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from steadytrain.components.preprocess.inputs import inputs_of
from steadytrain.components.shared.append_log import Record
from steadytrain.components.shared.cluster import Cluster, Refused, Unreachable
from steadytrain.components.shared.config import ComputeConfig, Dimension, RunConfig, load
from steadytrain.components.shared.config.load import validated
from steadytrain.components.shared.config.space import fidelity_problems
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.registry import RUN, Registry
from steadytrain.components.shared.stopping import stoppable
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.length import prepared, steps_of
from steadytrain.components.train.agent.processes import end_processes
from steadytrain.components.train.launch.job import SLACK_SECONDS, Job
from steadytrain.components.train.launch.launcher import jobs_for
from steadytrain.components.train.launch.removal import remove_jobs_below
from steadytrain.components.tune.designs import is_cross_validation, with_fold
from steadytrain.components.tune.driver import Watcher, drive, study_folder
from steadytrain.components.tune.history import Params
from steadytrain.components.tune.log import Log, open_log
from steadytrain.components.tune.results import write_results
from steadytrain.components.tune.space import in_order, varies
from steadytrain.components.tune.study import (
    NewDesign,
    Study,
    logs_address,
    studies_folder,
    study_name,
    study_of,
)
from steadytrain.components.tune.study_page import render, write_page
from steadytrain.components.tune.tracking import tracked
from steadytrain.components.tune.trials.base import Slot, Trials, imports_of
from steadytrain.components.tune.trials.folder import (
    TrialFolder,
    known_data,
    prepare_data,
    share_data,
    shared_data,
    trial_folders,
    trials_of,
)
from steadytrain.components.tune.trials.local import LINGER_SECONDS, LocalTrials, local_trials

STUDY: Final = "steadytrain.io/study"
"""Label of the jobs of a study's trials, with the study's name."""


def trials_for(
    study: Path, config: RunConfig, notify: Callable[[str], object], imports: Sequence[str]
) -> Trials:
    """Return the trials of a study, in pods or on this machine, as `compute.launcher` says.

    Args:
        study: the study's folder. In pods, it must be on the volume that they share.
        config: of the study.
        notify: receives lines for people, such as why a trial on a cluster waits.
        imports: the modules that all trials on this machine share (`imports_of`).

    Raises:
        Unreachable: the cluster's API server does not answer.
    """
    jobs, parallel = jobs_for(config.compute), config.tune.budget.parallel
    if jobs is None:
        return local_trials(study, parallel=parallel, imports=imports)
    seconds = config.recovery.stop_grace_seconds + 2 * SLACK_SECONDS
    return ClusterTrials(study, parallel, *jobs, seconds, notify)


@dataclass(frozen=True)
class RanksInPods:
    """Ranks in pods. Only their supervisors are on this machine."""

    parallel: int
    imports: ClassVar[Sequence[str]] = (
        "kubernetes.client",
        "kubernetes.config",
        "steadytrain.components.train.launch.pods",
    )

    def threads(self, _: ComputeConfig) -> None:
        return None

    def slots(self, _: ComputeConfig) -> list[Slot]:
        return [Slot(threads=1)] * self.parallel


class ClusterTrials(LocalTrials):
    """Trials that are supervised on this machine, and whose ranks are in jobs on a cluster.

    If the driver's pod is lost, the ranks of its trials stop with a checkpoint once they notice
    that nobody supervises them. The next driver removes their jobs before it continues them.

    Args:
        job: the kind of job.
        seconds: how long jobs have to end once they are deleted.
    """

    def __init__(
        self,
        study: Path,
        parallel: int,
        cluster: Cluster,
        job: type[Job],
        seconds: float,
        notify: Callable[[str], object],
    ) -> None:
        folder = Path(os.path.abspath(study))  # noqa: PTH100  links stay as they are
        super().__init__(folder, parallel, LINGER_SECONDS, RanksInPods(parallel), notify)
        self.cluster, self.job, self.seconds = cluster, job, seconds

    def train(self, number: int, config: RunConfig, until: int) -> None:
        super().train(number, _labeled(config, self.study.name), until)

    def attach(self) -> frozenset[int]:
        alive = super().attach()
        if not alive:
            self._remove_jobs()
        return alive

    def close(self, *, within: float = math.inf) -> None:
        try:
            super().close(within=within)
        finally:
            self._remove_jobs()

    def _remove_jobs(self) -> None:
        """Remove the jobs of all trials, none of which is supervised any more."""
        try:
            left = remove_jobs_below(
                self.cluster, trials_of(self.study), self.job.kinds, seconds=self.seconds
            )
        except (Unreachable, Refused) as error:
            left = [error.message]
        if left:
            # Their agents end with the lease. The exit handler or the next driver removes them.
            self.notify(f"not removed within {duration(self.seconds)}: {', '.join(left)}")


def _labeled(config: RunConfig, study: str) -> RunConfig:
    """Return the configuration of a trial whose jobs have the study's label."""
    pods = config.compute.pods
    pods = pods.model_copy(update={"labels": pods.labels | {STUDY: study}})
    compute = config.compute.model_copy(update={"pods": pods})
    return config.model_copy(update={"compute": compute})


TAKEN_OVER: Final = 5
"""How many trials of another study are tried again."""


def first_trials(config: RunConfig, other: str = "") -> list[Params]:
    """Return the parameters of the first trials.

    Trial 0 has the champion's parameters, or the configuration's own if there is no champion. Then
    come the best trials of another study.

    Args:
        other: the other study's name, in the same output folder or, with `tune.log`, at the same
            address; "" for none.

    Raises:
        BadInput: there is no such study.
        TrackingError: the registry cannot be used.
    """
    known = champion(config) or config
    queued = [_values(known, config.tune.space)]
    for params in best_of(config, other) if other else ():
        if params not in queued:
            queued.append(params)
    return queued


def champion(config: RunConfig) -> RunConfig | None:
    """Return the configuration of the champion's run; None if it is not known here."""
    workspace = Workspace.of(config)
    elsewhere = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not elsewhere and not workspace.tracking_store.is_file():
        # Opening the store would create it, which takes seconds.
        return None
    version = Registry(config, workspace).champion()
    if version is None or RUN not in version.tags:
        return None
    stored = Workspace(workspace.output, version.tags[RUN]).config
    return load(stored) if stored.is_file() else None


def best_of(config: RunConfig, other: str) -> Sequence[Params]:
    """Return the parameters of another study's best trials, best first."""
    records = open_log(logs_address(config), other).read()
    if not records:
        studies = studies_folder(config)
        known = sorted(path.name for path in studies.glob("*") if path.is_dir())
        raise BadInput(
            f"--from {other!r}: there is no such study",
            remedy=f"one of {', '.join(known)}" if known else f"{studies} holds no study",
        )
    _, history = study_of(records)
    best = sorted(
        (trial for trial in history.trials if trial.scores and not trial.too_slow),
        key=lambda trial: (-trial.reached, trial.scores[max(trial.scores)], trial.number),
    )
    return [trial.params for trial in best[:TAKEN_OVER]]


def _values(config: RunConfig, space: Mapping[str, Dimension]) -> Params:
    """Return a configuration's values of the space's fields, as a trial has them.

    It leaves out fields that are not set, and those that do not vary with these values.
    """
    content, values = config.model_dump(mode="json"), dict[str, Any]()
    for field in in_order(space):
        value: Any = content
        for part in field.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and varies(space, field, values):
            values[field] = value
    return values


def with_steps(
    config: RunConfig,
    records: Sequence[Record],
    folder: Path,
    notify: Callable[[str], object],
    data: DataRecord | None = None,
) -> RunConfig:
    """Return a study's configuration with `training.max_steps`, the steps of a full trial.

    A study cuts its trials at optimizer steps. Epochs are counted once, on the training side of the
    prepared data: in a cross-validation, without the first fold. The study keeps the number.

    Args:
        records: of the study's log, which this process holds.
        folder: of the study. The data are prepared there, unless they are.
        notify: receives a line for people.
        data: prepared data for the trials, if there are some.

    Raises:
        ConfigError: with so many steps, the study is not possible.
        BadInput, DataError, StorageError: as for the preprocess step, or the log is damaged.
    """
    if config.training.max_steps > 0:
        return config
    if records:
        return _limited(config, study_of(records)[0].training.max_steps)
    base = _base(config)
    data = data or known_data(folder, base)
    if data is None:
        notify(f"preparing the data: training.num_train_epochs is {_epochs(config)}")
        prepare_data(folder, base)
        data = known_data(folder, base)
        assert data is not None
    steps = steps_of(config.training, data.sides["train"])
    notify(f"a trial has {steps:,} steps: training.num_train_epochs is {_epochs(config)}")
    return _limited(config, steps)


def with_known_steps(config: RunConfig, folder: Path) -> RunConfig | None:
    """Return the same without preparing anything; None if no data are prepared yet."""
    if config.training.max_steps > 0:
        return config
    data = known_data(folder, _base(config)) or prepared(config)
    if data is None:
        return None
    return _limited(config, steps_of(config.training, data.sides["train"]))


def _limited(config: RunConfig, steps: int) -> RunConfig:
    training = config.training.model_copy(update={"max_steps": steps})
    # The name has the digest of the configuration as it is, with epochs.
    named = config.model_copy(update={"training": training, "run": study_name(config)})
    result = validated(named.model_dump(mode="json"))
    if problems := list(fidelity_problems(result)):
        raise ConfigError(problems)
    return result


def _base(config: RunConfig) -> RunConfig:
    return with_fold(config, 0) if is_cross_validation(config) else config


def _epochs(config: RunConfig) -> str:
    return f"{config.training.num_train_epochs:g}"


def _lose_damaged(study: Study, folder: Path, notify: Callable[[str], object]) -> None:
    """Train finished trials again if their files of scores have changed."""
    for trial in study.history.trials:
        trial_folder = TrialFolder(folder, trial.number)
        if (
            not trial.scored
            or trial.status != "finished"
            or not (why := trial_folder.damage(trial.scored))
        ):
            continue
        # Removed first: a process that dies in between finds no scores, and gets here again.
        shutil.rmtree(trial_folder.path, ignore_errors=True)
        study.lose(trial.number, why)
        notify(f"trial {trial.number} trains again: {why}")


def _lose_unlogged(study: Study, folder: Path, notify: Callable[[str], object]) -> None:
    """Remove trials that began after the log ends: their numbers may get other parameters."""
    for trial in trial_folders(folder):
        if trial.number < len(study.history.trials):
            continue
        if process := trial.process():
            end_processes(trial.path, process.pid)
        shutil.rmtree(trial.path)
        notify(f"trial {trial.number} begins again: the log has lost that it began")


def _begin_anew(folder: Path) -> None:
    """Keep a new study from what an earlier one left in its folder, perhaps with other data.

    Raises:
        BadInput: it left trials, of which the log knows nothing.
    """
    if left := trial_folders(folder):
        raise BadInput(
            f"{trials_of(folder)} holds {len(left):,} trials, and the study's log is empty or "
            "missing, so their settings and data are unknown",
            remedy="restore the log from a backup, or remove that folder or give the study another "
            "name (--run): it then begins again",
        )
    shutil.rmtree(shared_data(folder), ignore_errors=True)


def write_study(study: Study, folder: Path) -> None:
    """Write the results of a search and their page."""
    write_results(study, folder)
    write_page(render(study), folder)


def search(
    config: RunConfig,
    log: Log,
    watcher: Watcher,
    notify: Callable[[str], object],
    *,
    write: Callable[[Study, Path], None] = write_study,
    first: Callable[[], Sequence[Params]] = list,
    data: DataRecord | None = None,
    design: NewDesign | None = None,
    imports: Sequence[str] = (),
) -> Study:
    """Run or continue a study until it is complete.

    Args:
        log: of the study, which this process holds (`driving`).
        notify: receives further lines for people, such as why a trial on a cluster waits.
        write: writes the results to the study's folder, however the study ends.
        first: see `Study`.
        data: prepared data for the trials. None means that the first trial prepares them.
        design: see `Study`.
        imports: further modules that all trials on this machine share.

    Raises:
        ConfigError, DataError: see `with_steps`.
        BadInput: the data are not those that the study began with, or changed while it ran; or its
            trials are there without their log.
        Stopped: this process was asked to stop. The study can be continued.
        TooManyFailed, BadInput, StorageError: see `drive` and `Study`.
    """
    folder = study_folder(config)
    records = log.read()
    if not records and trials_of(folder).exists():
        _begin_anew(folder)
    inputs = inputs_of(config).digest() if data is None else data.inputs_digest
    config = with_steps(config, records, folder, notify, data)
    shared = [*imports_of(config, scored=is_cross_validation(config)), *imports]
    trials = trials_for(folder, config, notify, shared)
    with contextlib.ExitStack() as unused:
        unused.callback(trials.close)
        # A new search reads its table to divide it.
        if not records:
            trials.warm_up(config.compute)
        study = Study(config, log, first=first, design=design, inputs=inputs)
        if study.out_of_time and not study.history.trials:
            # Nothing can begin, so nothing is prepared.
            return study
        _lose_damaged(study, folder, notify)
        _lose_unlogged(study, folder, notify)
        if data is not None:
            share_data(folder, config, data)
        unused.pop_all()
    try:
        with stoppable() as stopping, tracked(study, watcher) as watchers:
            drive(study, trials, watchers, stopping.check)
    finally:
        write(study, folder)
    if inputs:
        study.check_inputs(inputs_of(config).digest())
    return study
