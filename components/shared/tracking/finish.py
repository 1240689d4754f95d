"""What a run sends to MLflow at its end. Nothing here can fail a successful run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, TrackingError
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.records import DataRecord, EvaluationRecord
from steadytrain.components.shared.tracking.batches import Batches, key
from steadytrain.components.shared.tracking.connect import (
    Tracking,
    error_with_timeout,
    open_tracking,
    short_timeouts,
    tracking_errors,
)
from steadytrain.components.shared.tracking.lineage import log_lineage
from steadytrain.components.shared.tracking.mlflow_sink import Delivery
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.tracking.run import continue_run, delete_doubles
from steadytrain.components.shared.workspace import Workspace

FINISH_SECONDS = 300.0
"""Longest wait for the store at the end of a run."""


def finish_run(
    config: RunConfig,
    workspace: Workspace,
    ok: bool,
    *,
    stopped: bool = False,
    spent: Mapping[str, float] = MappingProxyType({}),
    moment: float = 0.0,
) -> bool:
    """End the run in MLflow, after sending what training could not send, and the run's files.

    Args:
        config: the run's configuration.
        workspace: the run's workspace.
        ok: whether the run succeeded.
        stopped: whether it was asked to end.
        spent: the resources that training used, by metric name.
        moment: the time of these values in seconds. If they are sent twice, the same time makes
            them the same points.

    Returns:
        Whether the store accepted everything. If not, the run's events contain a warning.
    """

    def finish(tracking: Tracking, run_id: str) -> None:
        delivery = Delivery(tracking, workspace, run_id)
        delivery.catch_up()
        delivery.end_open_attempts()
        delete_doubles(tracking, workspace)
        _log_results(delivery.batches, run_id, workspace)
        _log_metrics(delivery.batches, run_id, spent, moment)
        status = "FINISHED" if ok else "KILLED" if stopped else "FAILED"
        tracking.client.set_terminated(run_id, status)
        for path, folder in _artifacts(workspace):
            tracking.client.log_artifact(run_id, str(path), folder)
        log_lineage(tracking, run_id, config, workspace)

    def send() -> None:
        tracking = open_tracking(config, workspace)
        run_id = continue_run(tracking, config, workspace)
        with tracking_errors(tracking.uri):
            finish(tracking, run_id)

    with short_timeouts():
        # A store that sends a byte now and then never hits the timeout of a single request.
        failure = error_with_timeout(FINISH_SECONDS, send)
    if failure is None:
        return True
    if isinstance(failure, TimeoutError):
        reason = f"the tracking store did not accept everything within {duration(FINISH_SECONDS)}"
    elif isinstance(failure, TrackingError | BadInput):
        reason = failure.message
    else:
        raise failure
    warn(workspace, f"{reason}; `steadytrain report` sends it again")
    return False


def _log_results(batches: Batches, run_id: str, workspace: Workspace) -> None:
    """Log the metrics of the test side on the run itself, so that lists of runs show them."""
    path = workspace.record("evaluate")
    if not path.is_file():
        return
    record = EvaluationRecord.load(path)
    values = {f"test_{name}": interval.value for name, interval in record.metrics.items()}
    values |= {f"baseline_{name}": number for name, number in record.baselines.items()}
    for name, score in record.tasks.items():
        values[name] = score.value
        if score.stderr is not None:
            values[f"{name}_stderr"] = score.stderr
    # Use the record's own time: if sent twice, they are the same points.
    _log_metrics(batches, run_id, values, path.stat().st_mtime)


def _log_metrics(batches: Batches, run_id: str, values: Mapping[str, float], moment: float) -> None:
    from mlflow.entities import Metric

    time = int(moment * 1000)
    metrics = [Metric(key(name), number, time, 0) for name, number in values.items()]
    batches.send(run_id, metrics=metrics)


def _artifacts(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """Yield files, each with its folder in the run's artifacts."""
    candidates = [
        (workspace.config, "configuration"),
        (workspace.record("train"), "training"),
        (workspace.report, "report"),
    ]
    prepared = workspace.record("preprocess")
    if prepared.is_file():
        data = DataRecord.load(prepared)
        candidates += [(data.path(name), "data") for name in ("card.json", "card.html")]
    yield from (pair for pair in candidates if pair[0].is_file())
