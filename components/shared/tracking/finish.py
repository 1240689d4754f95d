"""What a run sends to MLflow at its end: results, what it was made from, and what it made.

Nothing here can fail a successful run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput, TrackingError
from steadytrain.components.shared.events import Event, read_events
from steadytrain.components.shared.events.points import points
from steadytrain.components.shared.events.types import (
    CheckpointSaved,
    TrainingStarted,
    Validated,
    newest_attempt,
)
from steadytrain.components.shared.pagination import all_items
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
from steadytrain.components.shared.tracking.mlflow_sink import Delivery
from steadytrain.components.shared.tracking.notes import attempt_note, identity, recall, warn
from steadytrain.components.shared.tracking.run import adopt_runs, continue_run
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
        adopt_runs(tracking, workspace)
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
    # The same training with Transformers' Trainer: its arguments and its script.
    candidates += [(path, "transformers") for path in sorted(workspace.transformers.glob("*"))]
    prepared = workspace.record("preprocess")
    if prepared.is_file():
        data = DataRecord.load(prepared)
        candidates += [(data.path(name), "data") for name in ("card.json", "card.html")]
    yield from (pair for pair in candidates if pair[0].is_file())


DIGEST_LENGTH = 36
"""Longest digest of a dataset in MLflow. The tag `steadytrain.data_fingerprint` has all of it."""

FINGERPRINT = "steadytrain.data_fingerprint"
ENVIRONMENT, PLAN = "steadytrain.environment", "steadytrain.plan"
"""Tags of a run, as JSON: where its newest attempt ran, and how the work was divided there."""
_CHECKPOINT = "steadytrain.checkpoint"
_KIND = "checkpoint"


def log_lineage(tracking: Tracking, run_id: str, config: RunConfig, workspace: Workspace) -> None:
    """Log a run's data, environment, plan and checkpoints. It can be repeated.

    Raises what MLflow raises.
    """
    path = workspace.record("preprocess")
    if path.is_file():
        _log_data(tracking, run_id, config, DataRecord.load(path))
    events = read_events(workspace.events)
    for tag, content in _circumstances(events).items():
        tracking.client.set_tag(run_id, tag, json.dumps(content))
    _log_checkpoints(tracking, run_id, workspace, events)


def _circumstances(events: Sequence[Event]) -> dict[str, Mapping[str, Any]]:
    """Return the tags that describe the newest attempt, as plain data."""
    result: dict[str, Mapping[str, Any]] = {}
    if (newest := newest_attempt(events)) is not None:
        result[PLAN] = {
            "world_size": newest.world_size,
            "nodes": newest.nodes,
            "device": newest.device,
            "gradient_accumulation_steps": newest.gradient_accumulation_steps,
            **asdict(newest.batch),
            "strategy": newest.batch.strategy_on(newest.world_size),
        }
    for event in events:
        if isinstance(event, TrainingStarted) and event.environment:
            result[ENVIRONMENT] = event.environment
    return result


def _log_data(tracking: Tracking, run_id: str, config: RunConfig, data: DataRecord) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    sources = [redact(address) for _, address in config.data.addresses]
    about = {
        "fingerprint": data.fingerprint,
        "inputs_digest": data.inputs_digest,
        "card": "data/card.json",
        "sides": {
            name: {"documents": side.documents, "rows": side.rows, "tokens": side.tokens}
            for name, side in data.sides.items()
        },
    }
    dataset = Dataset(
        name=config.name,
        digest=data.fingerprint[:DIGEST_LENGTH],
        source_type="steadytrain",
        source=json.dumps({"sources": sources}),
        profile=json.dumps(about),
    )
    context = InputTag("mlflow.data.context", "training")
    tracking.client.log_inputs(run_id, [DatasetInput(dataset, [context])])
    tracking.client.set_tag(run_id, FINGERPRINT, data.fingerprint)


def _log_checkpoints(
    tracking: Tracking, parent: str, workspace: Workspace, events: Sequence[Event]
) -> None:
    """Create a model for each checkpoint that was validated, and the last one of each attempt.

    The models have no files: the checkpoint stays where it is, and retention may remove it.
    """
    from mlflow.entities import Metric

    known, client = _known(tracking, workspace), tracking.client
    for saved, scores in _worth_keeping(events):
        run_id = recall(workspace, attempt_note(parent, saved.attempt))
        name = f"attempt-{saved.attempt}-step-{saved.step}"
        if not run_id or name in known:
            continue
        model = client.create_logged_model(
            tracking.experiment_id,
            name=name,
            source_run_id=run_id,
            tags={_CHECKPOINT: identity(workspace)},
            params={
                "attempt": str(saved.attempt),
                "step": str(saved.step),
                "bytes": str(saved.bytes),
                "checkpoint": redact(saved.checkpoint),
            },
            model_type=_KIND,
        )
        if scores is not None:
            # The time of the event, as in the attempt's curve: there it is the same point.
            time = int(scores.time * 1000)
            metrics = [
                Metric(key(metric), value, time, saved.step, model.model_id)
                for metric, value in points(scores)
            ]
            client.log_batch(run_id, metrics=metrics)
        client.finalize_logged_model(model.model_id, "READY")


def _known(tracking: Tracking, workspace: Workspace) -> set[str]:
    """Return the names of this run's models. One that was not finished is replaced."""
    from mlflow.entities import LoggedModelStatus

    mine, names = f"tags.`{_CHECKPOINT}` = '{identity(workspace)}'", set()
    runs = all_items(
        lambda token: tracking.client.search_logged_models(
            [tracking.experiment_id], filter_string=mine, page_token=token
        )
    )
    for model in list(runs):
        if model.status == LoggedModelStatus.READY:
            names.add(model.name)
        else:
            tracking.client.delete_logged_model(model.model_id)
    return names


def _worth_keeping(
    events: Sequence[Event],
) -> Iterator[tuple[CheckpointSaved, Validated | None]]:
    """Yield checkpoints in order, each with the validation of its step if there was one."""
    scores: Mapping[tuple[int, int], Validated] = {
        (event.attempt, event.step): event for event in events if isinstance(event, Validated)
    }
    saved = {
        (event.attempt, event.step): event for event in events if isinstance(event, CheckpointSaved)
    }
    last = dict(sorted(saved))
    for position, event in sorted(saved.items()):
        if position in scores or last[event.attempt] == event.step:
            yield event, scores.get(position)
