"""What MLflow permanently refuses is kept and reported. Everything else arrives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Validated, Warned
from steadytrain.components.shared.tracking import MlflowSink, finish_run, use_tracking
from steadytrain.components.shared.tracking.batches import Batches
from steadytrain.components.shared.tracking.connect import Tracking, import_mlflow
from steadytrain.components.shared.workspace import Workspace

from support.tracking import BEGAN, ended, started, steps

ODD = "macro//f1"  # MLflow rejects it as a path that is not unique


def warnings(workspace: Workspace) -> list[str]:
    return [event.message for event in read_events(workspace.events) if isinstance(event, Warned)]


def refused(workspace: Workspace) -> list[dict[str, Any]]:
    (file,) = workspace.tracking.glob("*/refused.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def validated(step: int, **metrics: float) -> Validated:
    return Validated(
        time=BEGAN + 1000 + step,
        attempt=1,
        step=step,
        epoch=0.1,
        metrics={"loss": 0.5, **metrics},
        best=False,
    )


@pytest.mark.slow
def test_invalid_metric_name_does_not_block_others(config: RunConfig, workspace: Workspace) -> None:
    stream = workspace.stream("supervisor")
    for event in [started(1), *steps(1, range(20)), validated(20, **{ODD: 0.25})]:
        stream.emit(event)
    MlflowSink(config, workspace, batch_seconds=0.05, close_seconds=120).close()
    for event in [*steps(1, range(21, 30)), validated(30, **{ODD: 0.5}), ended(1, "finished")]:
        stream.emit(event)
    stream.close()
    MlflowSink(config, workspace, batch_seconds=0.05, close_seconds=120).close()
    assert finish_run(config, workspace, ok=True)

    client = use_tracking(config, workspace).client
    (run,) = client.search_runs(["1"], "attributes.run_name = 'attempt-1'")

    def arrived(name: str) -> list[int]:
        return sorted(point.step for point in client.get_metric_history(run.info.run_id, name))

    assert run.info.status == "FINISHED"
    assert arrived("loss") == [*range(20), *range(21, 30)]
    assert arrived("eval_loss") == [20, 30]
    kept = [(item["key"], item["step"], item["value"]) for item in refused(workspace)]
    assert kept == [(f"eval_{ODD}", 20, 0.25), (f"eval_{ODD}", 30, 0.5)]
    assert all("Invalid value" in item["reason"] for item in refused(workspace))
    (told,) = warnings(workspace)
    assert ODD in told
    assert "refused.jsonl" in told


def test_existing_parameter_value_is_kept(config: RunConfig, workspace: Workspace) -> None:
    from mlflow.entities import Param

    tracking = use_tracking(config, workspace)
    run_id = tracking.client.create_run(tracking.experiment_id).info.run_id
    batches = Batches(tracking, workspace, "parent")
    batches.send(run_id, params=[Param("a", "1")])
    for _ in range(2):
        batches.send(run_id, params=[Param(name, "2") for name in "zab"])
    assert tracking.client.get_run(run_id).data.params == {"a": "1", "b": "2", "z": "2"}
    assert [(item["key"], item["value"]) for item in refused(workspace)] == [("a", "2")]
    assert len(warnings(workspace)) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "INVALID_PARAMETER_VALUE"),
        (413, ""),
        (429, "REQUEST_LIMIT_EXCEEDED"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (500, "INTERNAL_ERROR"),
    ],
)
def test_unavailable_store_does_not_count_as_a_rejection(
    workspace: Workspace,
    answer: Callable[[int, str], str],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    from mlflow.entities import Metric

    body = json.dumps({"error_code": code, "message": "no"}) if code else "too large"
    uri = answer(status, body)
    batches = Batches(Tracking(uri, import_mlflow().MlflowClient(uri), "0"), workspace, "parent")
    with pytest.raises(Exception, match=r"no|too"):
        batches.send("0" * 32, metrics=[Metric("loss", 1.0, 1, step) for step in range(3)])
    assert not batches.file.exists()
    assert not warnings(workspace)
