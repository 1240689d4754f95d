"""The generated files of manifests/components/monitoring.

`python -m steadytrain.components.observe.dashboards FOLDER` writes them; `make monitoring` does so
for this repository.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from steadytrain.components.observe.alerts import ALERTS, Alert

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_HEIGHT: Final = 8


@dataclass(frozen=True)
class Panel:
    """One panel.

    queries: PromQL, each with the legend of its series.
    unit: Grafana's name of the unit.
    width: of the page's 24 columns.
    """

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8


@dataclass(frozen=True)
class Dashboard:
    """A page of panels.

    variable: the query for the values of `$run`; "" for a page without a choice of run.
    """

    uid: str
    title: str
    panels: Sequence[Panel]
    variable: str = ""


def _newest(metric: str, *, by: str = "run") -> str:
    """Return the values by run. A run's supervisors have a series each, with the same counters."""
    return f"max by ({by}) ({metric})"


def _series(metric: str) -> str:
    """Return the series of the run that the page shows."""
    return f'{metric}{{run="$run"}}'


def _of_run(metric: str, *, by: str = "run") -> str:
    return _newest(_series(metric), by=by)


FLEET: Final = Dashboard(
    "steadytrain-fleet",
    "steadytrain: all runs",
    (
        Panel("Active runs", {f"sum({_newest('run_active')})": "runs"}, kind="stat", width=4),
        Panel(
            "Cost",
            {f"sum({_newest('cost_usd_total')})": "cost"},
            "currencyUSD",
            kind="stat",
            width=4,
        ),
        Panel(
            "Failures in the last day",
            {"sum by (class) (increase(failures_total[1d])) > 0": "{{class}}"},
            kind="bargauge",
        ),
        Panel(
            "Time lost in the last day",
            {"sum by (class) (increase(lost_seconds_total[1d])) > 0": "{{class}}"},
            "s",
            kind="bargauge",
        ),
        Panel("Goodput", {_newest("goodput"): "{{run}}"}, "percentunit"),
        Panel("GPU utilization", {_newest("gpu_utilization"): "{{run}}"}, "percentunit"),
        Panel("Critical batch size", {_of_run("critical_batch_size"): "sequences"}),
        Panel("Speed", {_newest("tokens_per_second"): "{{run}} (tokens/s)"}),
        Panel("Training loss", {_newest("training_loss"): "{{run}}"}),
        Panel(
            "Progress",
            {f"{_newest('training_step')} / {_newest('training_max_steps')}": "{{run}}"},
            "percentunit",
        ),
        Panel("Cost by run", {_newest("cost_usd_total"): "{{run}}"}, "currencyUSD"),
        Panel(
            "Waiting for ranks",
            {
                "max by (run) ((time() - attempt_started_timestamp_seconds) "
                "* (1 - attempt_ready) * run_active)": "{{run}}"
            },
            "s",
        ),
        Panel("Age of what MLflow lacks", {_newest("sink_lag_seconds"): "{{run}}"}, "s"),
        Panel(
            "Duration of finished runs",
            {
                "histogram_quantile(0.5, sum by (le) (training_duration_seconds_bucket))": "median",
                "histogram_quantile(0.9, sum by (le) (training_duration_seconds_bucket))": "90 %",
            },
            "s",
        ),
    ),
)

RUN: Final = Dashboard(
    "steadytrain-run",
    "steadytrain: one run",
    (
        Panel(
            "Progress",
            {f"{_of_run('training_step')} / {_of_run('training_max_steps')}": "progress"},
            "percentunit",
            kind="gauge",
            width=4,
        ),
        Panel("Goodput", {_of_run("goodput"): "goodput"}, "percentunit", kind="gauge", width=4),
        Panel(
            "Cost",
            {_of_run("cost_usd_total"): "cost", _of_run("cost_budget_usd"): "budget"},
            "currencyUSD",
            kind="stat",
            width=4,
        ),
        Panel(
            "Attempts and failures",
            {
                _of_run("attempts_total"): "attempts",
                f"{_of_run('failures_total', by='class')} > 0": "{{class}}",
            },
            kind="stat",
            width=6,
        ),
        Panel(
            "Time by what it was spent on",
            {_of_run("run_seconds", by="phase"): "{{phase}}"},
            "s",
            kind="bargauge",
            width=6,
        ),
        Panel(
            "Loss",
            {_of_run("training_loss"): "training", _of_run("validation_loss"): "validation"},
        ),
        Panel(
            "Validation",
            {
                _of_run("validation_accuracy"): "accuracy",
                _of_run("validation_macro_f1"): "macro F1",
                _of_run("validation_perplexity"): "perplexity",
            },
        ),
        Panel("Learning rate", {_of_run("learning_rate"): "learning rate"}, "sci"),
        Panel(
            "Gradients",
            {
                _of_run("gradient_norm"): "norm",
                f"increase({_series('gradient_overflows_total')}[10m])": "overflows in 10 min",
                f"increase({_series('gradients_clipped_total')}[10m])": "clipped in 10 min",
                f"increase({_series('divergences_total')}[10m])": "divergences in 10 min",
            },
        ),
        Panel("Speed", {_of_run("tokens_per_second"): "tokens/s"}),
        Panel(
            "Utilization",
            {
                _of_run("gpu_utilization"): "GPU busy",
                _of_run("mfu"): "MFU",
                _of_run("padding_ratio"): "padding",
            },
            "percentunit",
        ),
        Panel(
            "Step time by phase",
            {
                f"sum by (phase) (rate({_series('step_seconds_total')}[$__rate_interval]))": (
                    "{{phase}}"
                )
            },
            "percentunit",
        ),
        Panel(
            "GPU memory",
            {
                _of_run("gpu_memory_allocated_bytes"): "allocated",
                _of_run("gpu_memory_reserved_bytes"): "reserved",
                _of_run("gpu_memory_peak_bytes"): "peak",
            },
            "bytes",
        ),
        Panel(
            "Micro-batch and allocation retries",
            {
                _of_run("micro_batch_size"): "micro-batch",
                f"increase({_series('gpu_memory_retries_total')}[10m])": "retries in 10 min",
            },
        ),
        Panel("Host memory", {_of_run("host_memory_bytes"): "rank 0"}, "bytes"),
        Panel(
            "Age of the newest checkpoint",
            {f"time() - {_of_run('last_checkpoint_timestamp_seconds')}": "age"},
            "s",
        ),
        Panel(
            "Checkpoint size (MB)",
            {
                f"{_of_run('checkpoint_size_mb_sum')} / {_of_run('checkpoint_size_mb_count')}": (
                    "mean"
                )
            },
            "decmbytes",
        ),
        Panel(
            "What MLflow lacks",
            {_of_run("sink_queue_bytes"): "bytes of events"},
            "bytes",
        ),
    ),
    variable="label_values(run_active, run)",
)

DASHBOARDS: Final = (FLEET, RUN)


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    ]
    if dashboard.variable:
        variables.append(
            {
                "name": "run",
                "label": "Run",
                "type": "query",
                "datasource": _DATASOURCE,
                "query": {"query": dashboard.variable, "refId": "run"},
                "definition": dashboard.variable,
                "refresh": 2,
                "sort": 1,
            }
        )
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["steadytrain"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": _placed(dashboard.panels),
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Return the panels in rows from left to right."""
    result, left, top = [], 0, 0
    for number, panel in enumerate(panels, start=1):
        if left + panel.width > _COLUMNS:
            left, top = 0, top + _HEIGHT
        grid_position = {"x": left, "y": top, "w": panel.width, "h": _HEIGHT}
        result.append(_panel(number, panel, grid_position))
        left += panel.width
    return result


def _panel(number: int, panel: Panel, grid_position: Mapping[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query,
            "legendFormat": legend,
        }
        for index, (query, legend) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": dict(grid_position),
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


RULES = "rules.yaml"
_HEAD = "# Generated by `make monitoring` from components/observe. Do not edit.\n"


def files() -> Mapping[str, str]:
    """Return the content of each file by name."""
    dashboards = {
        f"{item.uid.removeprefix('steadytrain-')}.json": f"{json.dumps(as_json(item), indent=2)}\n"
        for item in DASHBOARDS
    }
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "steadytrain"},
        "spec": groups(),
    }
    return {RULES: _HEAD + yaml.safe_dump(rule, sort_keys=False, width=100), **dashboards}


def groups() -> dict[str, Any]:
    """Return the alert rules as Prometheus itself reads them."""
    return {"groups": [{"name": "steadytrain", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.pending,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.meaning, "description": alert.remedy},
    }


def main(folder: str) -> None:
    """Write the files."""
    for name, text in files().items():
        Path(folder, name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
