"""The train step: turns a run's data into a trained model, with the trainer for its framework."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from steadytrain.components.shared import plugins, webhook
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.run import ALERTS, PROMETHEUS
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.digest import TRAINING_CODE, beside_weights, weights_digest
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput, Pruned, Stopped, TrainingFailed
from steadytrain.components.shared.events import Event, Reader
from steadytrain.components.shared.events.types import TrainingStarted, Warned
from steadytrain.components.shared.lm_tasks import check_lm_tasks
from steadytrain.components.shared.model_source import base_content, other_contents
from steadytrain.components.shared.records import DataRecord, TrainRecord
from steadytrain.components.shared.stage import ReuseStore, stage, step_key
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.tracking.pull_sink import run_in_parallel
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.train.agent.fork_server import ForkServer
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.launch.launcher import launcher_for
from steadytrain.components.train.launch.own_pod import with_task
from steadytrain.components.train.recovery.history import History
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.outcome import Outcome, check_callback, replay
from steadytrain.components.train.recovery.supervisor import OnValidation, Supervisor
from steadytrain.components.train.recovery.takeover import (
    LeasedRun,
    hold_run,
    plugin_code,
    strategy_code,
)
from steadytrain.components.train.transformers_script import of_run

if TYPE_CHECKING:
    from kfp import dsl

_PROGRAM = (sys.executable, "-m", "steadytrain.components.train.loop.outline")


def check_groups(config: RunConfig, data: DataRecord) -> None:
    """Reject groups that do not fit the model's structure, which another process builds.

    If it cannot, as for a model with code of its own, ranks check them.

    Raises:
        BadInput: an entry selects nothing, or all parameters are frozen.
    """
    training = config.training
    configured = training.param_groups or training.layer_decay is not None
    if not configured or importlib.util.find_spec("torch") is None:
        return
    content = {"config": config.model_dump(mode="json"), "data": data.model_dump(mode="json")}
    done = subprocess.run(_PROGRAM, input=json.dumps(content), capture_output=True, text=True)
    if done.returncode:
        return
    # Libraries may print before it.
    groups = json.loads(done.stdout.splitlines()[-1])
    if groups:
        raise BadInput(groups["message"], remedy=groups["remedy"])


CLOSE_SECONDS: Final = 20.0
"""How long the end of the train step waits for its sinks, which close at the same time. Prometheus
gets `observability.prometheus_linger_seconds` more."""


@runtime_checkable
class Trainer(Protocol):
    """A trainer for one framework."""

    def __call__(
        self,
        config: RunConfig,
        data: DataRecord,
        *,
        on_validation: OnValidation | None,
        sinks: Sequence[Reader],
        until: int | None = None,
        leased: LeasedRun | None = None,
    ) -> Outcome:
        """Train until the run ends, reaches its cut, is stopped, or fails.

        Args:
            leased: what this process holds already; a supervisor and a launcher take it over.
        """


@runtime_checkable
class OpenSink(Protocol):
    """What an entry point in `steadytrain.sinks` refers to: it opens a sink for a run."""

    def __call__(self, config: RunConfig, workspace: Workspace) -> Reader:
        """Return the sink. It receives the run's events from now on."""


def run(
    config: RunConfig,
    data: DataRecord | None = None,
    *,
    on_validation: OnValidation | None = None,
    sinks: Sequence[Reader] = (),
    until: int | None = None,
    leased: LeasedRun | None = None,
) -> Outcome:
    """Train. Resume from the newest checkpoint if there is one.

    You can call it repeatedly in one program. In the main thread, SIGINT and SIGTERM stop the
    training run with a checkpoint, and the outcome reports it.

    Args:
        data: prepared data. None means the output of this run's preprocess step.
        on_validation: called with each validation; returning False ends training as "pruned".
        sinks: receive the run's events; the caller closes them. A sink that fails is skipped from
            then on.
        until: optimizer steps after which training ends as "pruned"; a multiple of
            `training.eval_steps`. A later call continues from there, and the weights become those
            of a run that was never cut. None means to train to the end.
        leased: what this process holds already.

    Raises:
        BadInput: there is no trainer for the framework, there is no data, `on_validation` is not a
            function, or the run was started with other inputs.
        RunBusy: another process is training this run.
    """
    check_callback(on_validation)
    check_task(config)
    trainer = load_trainer(config.model.framework)
    data = data or _prepared(config)
    config.training.class_weights.check_labels(data.labels)
    return trainer(
        config, data, on_validation=on_validation, sinks=sinks, until=until, leased=leased
    )


def run_stage(
    config: RunConfig,
    data: DataRecord | None = None,
    *,
    on_validation: OnValidation | None = None,
    until: int | None = None,
    agent: ForkServer | None = None,
) -> TrainRecord:
    """Run the pipeline step. Reuse an earlier run's model if the inputs are unchanged.

    Args:
        data: prepared data. None means the output of this run's preprocess step.
        on_validation: called with each validation; returning False prunes the run. If an earlier
            run's model is reused, it gets that run's recorded validations.
        until: as for `run`.
        agent: forked while this process had no other threads.

    Raises:
        BadInput: as for `run`.
        Pruned: `on_validation` returned False, or training reached `until`. All ranks stopped after
            the same step, whose checkpoint is kept; a later call continues from it.
        TrainingFailed: training failed; the error has the root cause and its fix.
        RunBusy: another supervisor is training this run.
        Stopped: the run was asked to stop, and can be continued.
    """
    check_callback(on_validation)
    # Acquire the run first: if another supervisor is training it, this step reports nothing.
    with stage(config, "train", holding=hold_run(config)) as step:
        load_trainer(config.model.framework)
        data = data or _prepared(config)
        store = ReuseStore(step.workspace, "train", TrainRecord)
        key = _key(config, data, _changed(_history(step.workspace)))
        record = store.find(key, ttl_seconds=config.recovery.reuse_ttl_seconds)
        if record is not None:
            step.reuse(store.origin(key))
            for field in _measurements(config):
                message = (
                    f"{field}: nothing more is measured, since the model of run "
                    f"{store.origin(key).run_id} is reused; a run with another name and "
                    "recovery.reuse_ttl_seconds=0 trains again"
                )
                step.emit(Warned(stage=step.name, message=message))
            if on_validation is not None:
                replay(store.origin(key), on_validation)
        else:
            # If preprocessing ran in the light image, this has not been checked yet.
            check_lm_tasks(config)
            assert step.lease is not None
            leased = LeasedRun(step.lease, agent)
            with _tracked(config, step.workspace) as sinks:
                outcome = run(
                    config,
                    data,
                    on_validation=on_validation,
                    sinks=[*sinks, _ForTransformers(config, step.workspace)],
                    until=until,
                    leased=leased,
                )
            history = _history(step.workspace)
            _write_for_transformers(config, step.workspace, history)
            record = _recorded(outcome, step.workspace)
            files = (path for path in Path(record.model).rglob("*") if path.is_file())
            store.remember(_key(config, data, _changed(history)), record, sorted(files))
        record.save(step.workspace.record("train"))
        step.summary = (
            f"{record.metric} {record.best_score:.4g} at step {record.best_step} of {record.steps}"
        )
        return record


def _history(workspace: Workspace) -> History:
    result, _ = Ledger(workspace).readable()
    return result


def _write_for_transformers(config: RunConfig, workspace: Workspace, history: History) -> None:
    """Write the run as Transformers' Trainer does it, whether it finished or not."""
    script = of_run(config, history)
    for name, text in script.texts().items() if script else ():
        LocalStorage(workspace.transformers).write(name, text.encode())


@dataclass(frozen=True)
class _ForTransformers:
    """A sink that writes Trainer's files when training starts: a killed run has them too."""

    config: RunConfig
    workspace: Workspace

    def emit(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            history = _history(self.workspace)
            # The ledger gets it only after the sinks.
            history.add(event)
            _write_for_transformers(self.config, self.workspace, history)

    def close(self) -> None:
        """Hold nothing."""


def train_with_pytorch(
    config: RunConfig,
    data: DataRecord,
    *,
    on_validation: OnValidation | None,
    sinks: Sequence[Reader],
    until: int | None = None,
    leased: LeasedRun | None = None,
) -> Outcome:
    """Train with ranks on this machine or in pods, under the supervisor."""
    lease, agent = (leased.lease, leased.agent) if leased else (None, None)
    with launcher_for(config, agent=agent) as launcher:
        check_groups(config, data)
        return Supervisor(
            config, data, launcher, on_validation, sinks, until=until, held=lease
        ).run()


def load_trainer(framework: str) -> Trainer:
    """Return the trainer for a framework.

    Raises:
        BadInput: no installed package provides it, or it cannot be used.
    """
    return plugins.load_as(plugins.TRAINERS, framework, Trainer)


def load_sink(name: str) -> OpenSink:
    """Return what opens a sink.

    Raises:
        BadInput: no installed package provides it, or it cannot be used.
    """
    return plugins.load_as(plugins.SINKS, name, OpenSink)


def _prepared(config: RunConfig) -> DataRecord:
    return DataRecord.load(Workspace.of(config).record("preprocess"))


def _changed(history: History) -> list[tuple[str, int, float]]:
    """Return what changed while the run trained and decides what is learned.

    Each is the field, when, and the value. A person changed it, or memory ran out.
    """
    changed = [(item.field, item.step, item.after) for item in history.adjusted]
    shortened = (
        ("data.sequence_length", item.attempt, float(item.batch.sequence_length))
        for item in history.decisions
        if item.batch is not None and item.batch.sequence_length
    )
    return [*changed, *shortened]


def _measurements(config: RunConfig) -> Iterator[str]:
    """Yield the settings that measure something while a model trains."""
    yield from (name for name, *_ in config.training.monitor.features())
    if config.training.profile.steps is not None:
        yield "training.profile.steps"


def _key(
    config: RunConfig, data: DataRecord, changed: Sequence[tuple[str, int, float]] = ()
) -> str:
    """Return the key by which a trained model is reused."""
    return step_key(
        "train",
        data.fingerprint,
        config.counted(Use.TRAINING),
        plugin_code(config) | strategy_code(config),
        base_content(config),
        *other_contents(config).values(),
        *([changed] if changed else []),
        code=TRAINING_CODE,
    )


@contextlib.contextmanager
def _tracked(config: RunConfig, workspace: Workspace) -> Iterator[Sequence[Reader]]:
    """Open the configured sinks. Report and skip a sink that fails to open or close."""
    sinks: dict[str, Reader] = {}
    for name in (*config.sinks, *([ALERTS] if webhook.is_set() else [])):
        try:
            sinks[name] = load_sink(name)(config, workspace)
        except Stopped:
            raise
        except (Exception, SystemExit) as error:
            message = f"the sink {name!r} failed, and training continues without it: {error}"
            warn(workspace, message)
    try:
        yield list(sinks.values())
    finally:
        linger = config.observability.prometheus_linger_seconds
        failures = run_in_parallel(
            {name: sink.close for name, sink in sinks.items()},
            lambda name: CLOSE_SECONDS + (linger if name == PROMETHEUS else 0),
        )
        for name, failure in failures.items():
            warn(workspace, f"the sink {name!r} could not be closed: {failure}")


def _recorded(outcome: Outcome, workspace: Workspace) -> TrainRecord:
    result = outcome.result
    if outcome.failure is not None:
        raise _failed(outcome, workspace)
    check_complete(outcome)
    assert result is not None
    return TrainRecord(
        outcome=outcome.outcome,
        model=result.model,
        weights_digest=weights_digest(Path(result.model)),
        files=beside_weights(Path(result.model)),
        metric=result.metric,
        best_score=result.best_score,
        best_step=result.best_step,
        steps=result.step,
        attempts=outcome.attempts,
        parameters=result.parameters,
        seconds=outcome.seconds,
        decisions=list(outcome.decisions),
    )


def check_complete(outcome: Outcome) -> None:
    """Check that training that did not fail has come to its end.

    Raises:
        Pruned: it was pruned.
        Stopped: it was asked to stop.
    """
    if outcome.outcome == "pruned":
        raise Pruned(outcome.step)
    if outcome.outcome == "preempted":
        raise Stopped
    if outcome.result is None or not outcome.succeeded:
        raise Stopped(signal.SIGINT)


def _failed(outcome: Outcome, workspace: Workspace) -> TrainingFailed:
    failure = outcome.failure
    assert failure is not None
    lines = [f"training failed at step {outcome.step} ({failure.failure_class}): {failure.message}"]
    if failure.failure_class is FailureClass.USER_BUG and failure.traceback:
        # This goes first: it points to the user's own code, which is where the fix belongs.
        lines.append(failure.traceback.rstrip())
    lines += outcome.account
    log = workspace.attempts / f"{outcome.attempts:04d}" / f"rank-{failure.rank}.log"
    # A rank that never started has no log.
    lines += [f"log: {log}"] if log.exists() else []
    return TrainingFailed(
        redact("\n".join(lines)), failure_class=failure.failure_class, remedy=failure.remedy
    )


def kfp_train(
    *,
    resolved: dsl.Artifact,
    data: dsl.Dataset,
    model: dsl.Model,
    result: dsl.Metrics,
    task: dsl.TaskConfig | None,
) -> None:
    """Run the step. The model stays in the workspace, and the artifact's metadata points to it."""
    config = with_task(load(Path(resolved.path)), task)
    publish(config, run_stage(config, DataRecord.load(Path(data.path))), model, result)


def publish(config: RunConfig, record: TrainRecord, model: dsl.Model, result: dsl.Metrics) -> None:
    """Describe a trained model in KFP artifacts."""
    shutil.copyfile(Workspace.of(config).record("train"), model.path)
    model.metadata.update(folder=record.model, weights_digest=record.weights_digest)
    result.log_metric(f"best_{record.metric}", record.best_score)
    result.log_metric("best_step", record.best_step)
    result.log_metric("steps", record.steps)
    result.log_metric("attempts", record.attempts)
    result.log_metric("seconds", round(record.seconds, 1))
