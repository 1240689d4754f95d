"""Run the whole DAG in this process, for programs that drive runs, such as a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import Pruned
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    RegistrationRecord,
    TrainRecord,
)
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.outcome import check_callback
from steadytrain.components.train.recovery.takeover import check_continues
from steadytrain.pipelines.early_checks import check_plugins
from steadytrain.pipelines.options import check_extra
from steadytrain.pipelines.runs import run_lock

if TYPE_CHECKING:
    from steadytrain.components.train.recovery.supervisor import OnValidation


@dataclass(frozen=True)
class RunResult:
    """The records of a run's steps.

    outcome: "finished", "early_stopped" or "pruned". A pruned run has data and nothing else.
    step: optimizer steps done.
    """

    outcome: str
    step: int
    data: DataRecord
    train: TrainRecord | None = None
    evaluation: EvaluationRecord | None = None
    gate: GateRecord | None = None
    registration: RegistrationRecord | None = None


def run(config: RunConfig, *, on_validation: OnValidation | None = None) -> RunResult:
    """Run every step of the DAG, and the report in the end, whatever happened before.

    The same configuration continues the same run. In the main thread, SIGINT and SIGTERM stop the
    run, which can be continued.

    Args:
        on_validation: called with each validation; returning False prunes the run: its ranks stop
            after the same step and keep its checkpoint. Call `run` again to continue from there;
            the weights become those of a run that was never pruned. If an earlier run's model is
            reused, it gets that run's recorded validations, and can prune this run all the same.

    Raises:
        BadInput: `on_validation` is not a function, or packages are missing.
        ConfigError: a plugin that the run uses is broken.
        SteadytrainError: a step failed; the message and the remedy are those of the step.
        RunBusy: another process is using this run.
        Stopped: a signal stopped the run.
    """
    from steadytrain.components.report.step import run as report

    check_callback(on_validation)
    check_extra("train", "steadytrain.pipelines.run")
    check_plugins(config)
    workspace = Workspace.of(config)
    workspace.create()
    with run_lock(workspace):
        check_continues(config)
        try:
            return _steps(config, on_validation)
        finally:
            report(config)


def _steps(config: RunConfig, on_validation: OnValidation | None) -> RunResult:
    # Each step imports its libraries only when it is reached: bad input shows at once.
    from steadytrain.components.preprocess.step import run as preprocess
    from steadytrain.components.train.recovery.takeover import begin_run
    from steadytrain.components.train.step import run_stage

    begin_run(config)
    data = preprocess(config)
    try:
        train = run_stage(config, data, on_validation=on_validation)
    except Pruned as error:
        return RunResult("pruned", error.step, data)
    return _judged(config, data, train)


def _judged(config: RunConfig, data: DataRecord, train: TrainRecord) -> RunResult:
    from steadytrain.components.evaluate.step import run as evaluate
    from steadytrain.components.register.step import promote
    from steadytrain.components.register.step import run as register

    evaluation, gate = evaluate(config, data, train)
    registration = register(config)
    if gate.promoted:
        registration = promote(config)
    return RunResult(train.outcome, train.steps, data, train, evaluation, gate, registration)
