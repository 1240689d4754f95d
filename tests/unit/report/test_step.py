"""The report step, with a real tracking store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.report.facts import gather
from steadytrain.components.report.step import run
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import StepFinished, Warned
from steadytrain.components.shared.tracking import parent_run, use_tracking
from steadytrain.components.train.recovery.times import Times

from support.stores import copy_store


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("language_model", "FINISHED"), ("failed", "FAILED")])
def test_page_is_written_and_kept_with_the_run(
    name: str, status: str, request: pytest.FixtureRequest, empty_store: Path
) -> None:
    written = request.getfixturevalue(name)
    config, workspace = written.config, written.workspace
    copy_store(empty_store, workspace.output)
    run_id = parent_run(config, workspace)
    page = run(config)
    assert page == workspace.report
    assert page.read_text().startswith("<!DOCTYPE html>")
    client = use_tracking(config, workspace).client
    assert client.get_run(run_id).info.status == status
    metrics = client.get_run(run_id).data.metrics
    times = Times.of(gather(workspace).spans)
    assert metrics["goodput"] == pytest.approx(times.goodput)
    assert metrics["time_lost_seconds"] == pytest.approx(times.lost)
    assert metrics["training_duration_seconds"] == pytest.approx(times.wall)
    assert "cost_usd" not in metrics, "no price is known"
    assert [item.path for item in client.list_artifacts(run_id, "report")] == ["report/report.html"]
    last = read_events(workspace.events)[-1]
    assert isinstance(last, StepFinished)
    assert last.stage == "report"

    again = run(config)
    assert len(client.get_metric_history(run_id, "goodput")) == 1
    assert again.read_text().count("<section") == page.read_text().count("<section")


def test_tracking_that_is_down_does_not_fail_the_report(failed: Any, tmp_path: Any) -> None:
    tracking = failed.config.tracking.model_copy(update={"uri": "http://127.0.0.1:1"})
    config = failed.config.model_copy(update={"tracking": tracking})
    page = run(config)
    assert "failed in train" in page.read_text()
    events = read_events(failed.workspace.events)
    warned = [item.message for item in events if isinstance(item, Warned)]
    assert sum("Connection refused" in text for text in warned) == 1


@pytest.mark.slow
def test_run_that_was_stopped_is_killed_in_mlflow(bare: Any, empty_store: Path) -> None:
    copy_store(empty_store, bare.workspace.output)
    run_id = parent_run(bare.config, bare.workspace)
    bare.again()
    bare.start_step("train")
    bare.fail("train", "Stopped", "stopped")
    run(bare.config)
    client = use_tracking(bare.config, bare.workspace).client
    assert client.get_run(run_id).info.status == "KILLED"
