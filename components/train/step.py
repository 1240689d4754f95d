"""The train step: a run's data in, a trained model out, by whichever trainer fits."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from steadytrain.components.shared.base_model import base_content
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.digest import TRAINING_CODE, users_code_digest, weights_digest
from steadytrain.components.shared.errors import BadInput, Stopped, TrainingFailed
from steadytrain.components.shared.events import Sink
from steadytrain.components.shared.records import DataRecord, TrainRecord
from steadytrain.components.shared.reuse import ReuseStore, step_key
from steadytrain.components.shared.stage import stage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.choose import launcher_for
from steadytrain.components.train.recovery.failures import FailureClass
from steadytrain.components.train.recovery.outcome import Outcome
from steadytrain.components.train.recovery.ownership import owned
from steadytrain.components.train.recovery.supervisor import OnValidation, Supervisor


class Trainer(Protocol):
    """Trains with one framework."""

    def __call__(
        self,
        config: RunConfig,
        data: DataRecord,
        *,
        on_validation: OnValidation | None,
        sinks: Sequence[Sink],
    ) -> Outcome:
        """Trains until the run ends, is stopped, or fails."""


def run(
    config: RunConfig,
    data: DataRecord | None = None,
    *,
    on_validation: OnValidation | None = None,
    sinks: Sequence[Sink] = (),
) -> Outcome:
    """Trains; continues from the newest checkpoint where there is one.

    Can be called again and again in one program. In the main thread, SIGINT and
    SIGTERM stop the training, with a checkpoint, and are told by the outcome.

    Args:
        data: prepared data; None: what this run's preprocess step left.
        on_validation: gets each validation; False ends the training as "pruned".
        sinks: get the run's events; the caller closes them. One that fails is left out.

    Raises:
        BadInput: no such framework, no data, or the run was begun with other inputs.
        RunBusy: another process trains this run.
    """
    trainer = _trainer(config.model.framework)
    return trainer(config, data or _prepared(config), on_validation=on_validation, sinks=sinks)


def run_stage(config: RunConfig, data: DataRecord | None = None) -> TrainRecord:
    """The step of the pipeline: a record of the trained model, from work or from an earlier run.

    Raises:
        TrainingFailed: with the root cause and its remedy.
        RunBusy: another supervisor trains this run.
        Stopped: it was asked to stop, and can be continued.
    """
    # What another supervisor trains is its own: nothing is told of a step that may not begin.
    with stage(config, "train", holding=owned(config)) as step:
        _trainer(config.model.framework)
        data = data or _prepared(config)
        store = ReuseStore(step.workspace, "train", TrainRecord)
        key = _key(config, data)
        record = store.find(key, ttl_seconds=config.recovery.reuse_ttl_seconds)
        if record is not None:
            step.reused = True
        else:
            with _tracked(config, step.workspace) as sinks:
                outcome = run(config, data, sinks=sinks)
            record = _recorded(outcome, step.workspace)
            files = (path for path in Path(record.model).rglob("*") if path.is_file())
            store.remember(key, record, sorted(files))
        record.save(step.workspace.record("train"))
        step.summary = (
            f"{record.metric} {record.best_score:.4g} at step {record.best_step} of {record.steps}"
        )
        return record


def train_with_pytorch(
    config: RunConfig,
    data: DataRecord,
    *,
    on_validation: OnValidation | None,
    sinks: Sequence[Sink],
) -> Outcome:
    """Ranks on this machine or in pods, watched by the supervisor."""
    with launcher_for(config) as launcher:
        return Supervisor(config, data, launcher, on_validation, sinks).run()


TRAINERS: dict[str, Trainer] = {"pytorch": train_with_pytorch}
"""Trainers by `model.framework`."""


def _trainer(framework: str) -> Trainer:
    if framework not in TRAINERS:
        raise BadInput(
            f"model.framework = {framework!r}: no trainer of that name",
            remedy=f"one of {', '.join(sorted(TRAINERS))}",
        )
    return TRAINERS[framework]


def _prepared(config: RunConfig) -> DataRecord:
    return DataRecord.load(Workspace.of(config).record("preprocess"))


def _key(config: RunConfig, data: DataRecord) -> str:
    sections = [config.data, config.model, config.training, config.compute]
    return step_key(
        "train",
        data.fingerprint,
        *(
            section.model_dump(mode="json", exclude={"price_per_hour", "pods"})
            for section in sections
        ),
        users_code_digest(config.data.task),
        base_content(config),
        rooms=TRAINING_CODE,
    )


@contextlib.contextmanager
def _tracked(config: RunConfig, workspace: Workspace) -> Iterator[Sequence[Sink]]:
    from steadytrain.components.shared.tracking import MlflowSink

    sink = MlflowSink(config, workspace)
    try:
        yield [sink]
    finally:
        sink.close()


def _recorded(outcome: Outcome, workspace: Workspace) -> TrainRecord:
    result = outcome.result
    if outcome.failure is not None:
        raise _failed(outcome, workspace)
    if outcome.outcome == "preempted":
        raise Stopped
    if result is None or not outcome.succeeded:
        raise Stopped(signal.SIGINT)
    return TrainRecord(
        outcome=outcome.outcome,
        model=result.model,
        weights_digest=weights_digest(Path(result.model)),
        metric=result.metric,
        best_score=result.best_score,
        best_step=result.best_step,
        steps=result.step,
        attempts=outcome.attempts,
        parameters=result.parameters,
        seconds=outcome.seconds,
        decisions=list(outcome.decisions),
    )


def _failed(outcome: Outcome, workspace: Workspace) -> TrainingFailed:
    failure = outcome.failure
    assert failure is not None
    lines = [f"training failed at step {outcome.step} ({failure.failure_class}): {failure.message}"]
    if failure.failure_class is FailureClass.USER_BUG and failure.traceback:
        # Before all else: it names the user's own code, which is what is to be mended.
        lines.append(failure.traceback.rstrip())
    lines += outcome.account
    log = workspace.attempts / f"{outcome.attempts:04d}" / f"rank-{failure.rank}.log"
    # A rank that never came has none.
    lines += [f"log: {log}"] if log.exists() else []
    return TrainingFailed(
        redact("\n".join(lines)), failure_class=failure.failure_class, remedy=failure.remedy
    )
