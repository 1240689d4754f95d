"""A study in MLflow: one run for the study, and one nested run for each trial that was started.

Those that were not are a number in a tag of the study: a search out of time leaves out hundreds.
Everything follows from the study's history. A note in the study's folder remembers each MLflow run
and what was sent to it, so a driver that starts again sends only what is missing. A thread sends,
so a server that hangs never delays the study.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.artifact import Artifact
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.tracking.batches import (
    MAX_ITEMS_A_CALL,
    MAX_METRICS_A_CALL,
    flatten,
    in_batches,
    key,
    value,
)
from steadytrain.components.shared.tracking.connect import (
    PARENT,
    Tracking,
    open_tracking,
    run_id_from_environment,
    short_timeouts,
    tracking_errors,
)
from steadytrain.components.shared.tracking.notes import recall, remember
from steadytrain.components.shared.tracking.pull_sink import PullSink
from steadytrain.components.shared.tracking.run import active_run, adopt_runs, new_run
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tune.designs import is_cross_validation
from steadytrain.components.tune.driver import Watcher, study_folder
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.results import best
from steadytrain.components.tune.study import Study, study_name
from steadytrain.components.tune.trials.folder import ARTIFACT, PEAK, TrialFolder

STUDY: Final = "study"
_STATUS: Final = {
    "running": "RUNNING",
    "paused": "SCHEDULED",
    "finished": "FINISHED",
    "discarded": "KILLED",
    "failed": "FAILED",
}
_EVERY_SECONDS: Final = 5.0
"""How long changes are collected: units of a search take seconds, and each is then sent once."""


class StudyWorkspace(Workspace):
    """The folder of a study, where tracking keeps its notes and its warnings."""

    @property
    def folder(self) -> Path:
        return self.output / "studies" / self.run_id


@dataclass(frozen=True)
class Sent:
    """What MLflow is to know about a study or a trial, in plain data.

    curve: (step, metrics) of each validation.
    costs: metrics of the whole run, by name.
    """

    name: str
    status: str
    params: Mapping[str, Any]
    tags: Mapping[str, str]
    curve: tuple[tuple[int, Mapping[str, float]], ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        content = [self.status, dict(self.params), dict(self.tags), self.curve]
        return value_digest([*content, dict(self.costs)] if self.costs else content)

    @property
    def points(self) -> list[tuple[int, Mapping[str, float]]]:
        """The step and the metrics of each validation, with what the run cost at the last one."""
        last = self.curve[-1][0] if self.curve else 0
        return [*self.curve, (last, self.costs)]


@contextlib.contextmanager
def tracked(study: Study, watcher: Watcher) -> Iterator[Watcher]:
    """Yield a watcher that also sends the study to MLflow, if `tracking.sinks` names it."""
    if "mlflow" not in study.config.tracking.sinks or find_spec("mlflow") is None:
        yield watcher
        return
    tracker, ok = StudyTracker(study.config), False
    try:
        yield _Watchers(watcher, tracker)
        ok = True
    finally:
        tracker.close(study, ok=ok)


class _Watchers:
    """Several watchers, called in order."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def resumed(self, study: Study) -> None:
        for watcher in self._watchers:
            watcher.resumed(study)

    def started(self, study: Study, trial: Trial) -> None:
        for watcher in self._watchers:
            watcher.started(study, trial)

    def ended(self, study: Study, trial: Trial) -> None:
        for watcher in self._watchers:
            watcher.ended(study, trial)


class StudyTracker:
    """Sends a study to MLflow in the background. It implements `Watcher`."""

    def __init__(self, config: RunConfig, *, every_seconds: float = _EVERY_SECONDS) -> None:
        self._config = config
        output = Path(config.output).absolute()
        self._workspace = StudyWorkspace(output, study_name(config))
        self._wanted = dict[str, Sent]()
        self._lock = threading.Lock()
        self._is_closing = False
        self._sink = PullSink(
            "MLflow",
            self._workspace,
            self._open,
            around=short_timeouts,
            batch_seconds=every_seconds,
            promise="the study continues, and MLflow gets it later",
        )

    def resumed(self, study: Study) -> None:
        self._want({STUDY: _of_study(study, "RUNNING")})
        self._want_started(study, study.history.trials)

    def started(self, study: Study, trial: Trial) -> None:
        self._want({_note(trial): _of_trial(study, trial)})

    def ended(self, study: Study, trial: Trial) -> None:
        self._want_started(study, [trial])
        self._want({STUDY: _of_study(study, "RUNNING")})

    def close(self, study: Study, *, ok: bool) -> None:
        """Send what is missing within a few seconds. A later driver sends the rest.

        Args:
            ok: whether the study is complete, and was not stopped.
        """
        self._want_started(study, study.history.trials)
        self._want({STUDY: _of_study(study, "FINISHED" if ok else "KILLED")})
        self._is_closing = True
        self._sink.close()

    def catch_up(self, *, give_up: Callable[[], bool] = lambda: False) -> None:
        """Send what changed. Stop if `give_up` returns true before a run.

        Raises:
            TrackingError: MLflow does not accept it.
        """
        assert self._tracking is not None
        with tracking_errors(self._tracking.uri):
            while not give_up() and (suggestion := self._next()):
                self._deliver(self._tracking, *suggestion)
                self._sent(*suggestion)
            if self._is_closing and not give_up():
                adopt_runs(self._tracking, self._workspace)

    def _open(self) -> StudyTracker:
        self._tracking = open_tracking(self._config, self._workspace)
        with tracking_errors(self._tracking.uri):
            adopt_runs(self._tracking, self._workspace)
        return self

    def _want_started(self, study: Study, trials: Sequence[Trial]) -> None:
        started = [trial for trial in trials if trial.status != "skipped"]
        self._want({_note(trial): _of_trial(study, trial) for trial in started})

    def _want(self, found: Mapping[str, Sent]) -> None:
        with self._lock:
            self._wanted |= found

    def _next(self) -> tuple[str, Sent] | None:
        """Return what is to be sent next: the study first, since its trials are nested in it."""
        with self._lock:
            for note in sorted(self._wanted, key=lambda name: (name != STUDY, name)):
                if recall(self._workspace, f"sent/{note}") != self._wanted[note].digest:
                    return note, self._wanted[note]
                del self._wanted[note]
        return None

    def _sent(self, note: str, sent: Sent) -> None:
        remember(self._workspace, f"sent/{note}", sent.digest)

    def _deliver(self, tracking: Tracking, note: str, sent: Sent) -> None:
        """Send what the store lacks of a run, in few calls: MLflow takes tens of ms for each."""
        from mlflow.entities import Metric, Param, RunTag

        client, tags = tracking.client, dict(sent.tags)
        if parent := self._parent(note):
            tags[PARENT] = parent
        tags = {name: value(text) for name, text in tags.items()}
        known = recall(self._workspace, note)
        run = active_run(tracking, known) if known else None
        if run is None:
            run = new_run(tracking, self._workspace, note, run_name=sent.name, tags=tags)
        run_id, began = run.info.run_id, run.info.start_time
        params = [
            Param(name, text)
            for name, text in flatten(dict(sent.params))
            if name not in run.data.params
        ]
        changed = [RunTag(*tag) for tag in tags.items() if run.data.tags.get(tag[0]) != tag[1]]
        # A point that is sent again has the same time, which makes it the same point.
        points = [
            Metric(key(name), number, began + step, step)
            for step, metrics in sent.points
            for name, number in metrics.items()
        ]
        together = MAX_ITEMS_A_CALL - len(params) - len(changed)
        if params or changed or points:
            client.log_batch(run_id, points[:together], params, changed)
        for part in in_batches(points[together:], MAX_METRICS_A_CALL):
            client.log_batch(run_id, metrics=part)
        if run.info.status == sent.status == "RUNNING":
            return
        if sent.status in ("RUNNING", "SCHEDULED"):
            client.update_run(run_id, status=sent.status)
        else:
            client.set_terminated(run_id, sent.status)

    def _parent(self, note: str) -> str:
        """Return the MLflow run that another one is nested in; "" for none."""
        if note == STUDY:
            return run_id_from_environment()
        return recall(self._workspace, STUDY)


def _note(trial: Trial) -> str:
    return f"trial-{trial.number:06d}"


def _of_study(study: Study, status: str) -> Sent:
    # The best validation of a fold says nothing about a configuration.
    winner, tune = None if is_cross_validation(study.config) else best(study), study.tune
    tags = {}
    if winner is not None:
        tags = {
            f"steadytrain.best_{item.metric}": str(number)
            for item, number in zip(tune.objectives, study.history.values(winner), strict=True)
        } | {"steadytrain.best_trial": str(winner.number)}
    return Sent(
        study_name(study.config),
        status,
        {"tune": tune.model_dump(mode="json", include={"space", "objective", "sampler", "pruner"})},
        {
            "mlflow.source.name": "steadytrain",
            "steadytrain.study": study_name(study.config),
            "steadytrain.trials": str(len(study.history.trials)),
            "steadytrain.trials_not_started": str(study.history.not_started),
            **tags,
        },
    )


def _costs(study: Study, trial: Trial) -> dict[str, float]:
    """Return what a trial that has ended cost, with the names of a search's board."""
    if not trial.seconds or trial.status in ("running", "paused"):
        return {}
    usd = study.usd(trial.seconds / 3600)
    result = {"fit_seconds": trial.seconds} | ({} if usd is None else {"usd": usd})
    scores = TrialFolder(study_folder(study.config), trial.number).scores
    if not trial.scored or not scores.is_file():
        return result
    import pyarrow as pa
    import pyarrow.parquet as pq

    # The board says what is wrong with a file that is damaged.
    with contextlib.suppress(OSError, pa.ArrowException, ValueError):
        measured = pq.read_schema(scores).metadata or {}
        if PEAK in measured:
            result["peak_memory_mb"] = int(measured[PEAK]) / 1e6
        if ARTIFACT in measured:
            artifact = Artifact.model_validate_json(measured[ARTIFACT])
            result |= artifact.model_dump(exclude_none=True, exclude={"schema_version"})
    return result


def _of_trial(study: Study, trial: Trial) -> Sent:
    return Sent(
        f"trial {trial.number}",
        _STATUS[trial.status],
        dict(trial.params),
        {
            "steadytrain.trial": str(trial.number),
            "steadytrain.status": trial.status,
            **({"steadytrain.failure": trial.failure} if trial.failure else {}),
        },
        tuple((step, dict(metrics)) for step, metrics in trial.curve),
        _costs(study, trial),
    )
