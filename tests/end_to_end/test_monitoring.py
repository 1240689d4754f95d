"""A real Prometheus scrapes a traced training run whose rank and then supervisor are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from steadytrain.components.observe.metrics import SERIES
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    CheckpointSaved,
    Validated,
)
from steadytrain.components.train.recovery.ledger import Ledger
from steadytrain.components.train.recovery.times import Times, spans

from support.command import kill_paused, paused_rank, wait_for
from support.otlp import attributes, receiving
from support.pause import Pause
from support.ports import free_port
from support.prometheus import needed, scraping
from support.training import Bench, events_of, language_rows, write_data

PRICE = 36.0
TRAIN = """
import sys
from steadytrain.components.shared.config import load
from steadytrain.components.train.step import run_stage
run_stage(load(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def collector():
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def scraped(tmp_path_factory, collector):
    """A finished run whose rank and first supervisor were killed, and what others know about it."""
    needed("prometheus")
    root, port = tmp_path_factory.mktemp("monitoring"), free_port()
    data = write_data(root / "data", language_rows(60), language_rows(8, seed=1))
    training = {
        "max_steps": 120,
        "global_batch_size": 4,
        "learning_rate": 5e-3,
        "eval_steps": 40,
        "save_steps": 20,
        "logging_steps": 1,
    }
    run = Bench.make(
        root / "output",
        data,
        run="scraped",
        training=training,
        compute={"device": "cpu", "threads_per_rank": 1, "price_per_hour": PRICE},
        recovery={"backoff_seconds": 0.1},
        tracking={"sinks": ["otlp"]},
        observability={
            "prometheus_port": port,
            "prometheus_linger_seconds": 300,
            "otlp_endpoint": collector.endpoint,
        },
    )
    run.workspace.create()
    run.workspace.config.write_text(run.config.to_yaml())
    run.data.save(run.workspace.record("preprocess"))
    command = [sys.executable, "-c", TRAIN, str(run.workspace.config)]
    pause = Pause(root / "pause", 40)
    environment = {**os.environ, **pause.everywhere, "OMP_NUM_THREADS": "1"}
    with scraping(port, root / "prometheus") as prometheus:
        first = subprocess.Popen(command, env=environment)
        # The run continues until the next checkpoint, which waits for the one that is written.
        wait_for(lambda: (prometheus.value("training_step") or 0) >= 40)
        kill_paused(pause, first, then=60)
        wait_for(lambda: prometheus.value("attempts_total") == 2 and collector.named("attempt"))
        wait_for(lambda: prometheus.value("attempt_ready") == 1)
        paused_rank(pause, first)
        first.kill()
        first.wait()
        pause.set(None)
        second = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert second.returncode == 0, second.stderr
        yield run, prometheus.at_last_scrape("training_step")


@pytest.fixture(scope="module")
def times(scraped):
    run, _ = scraped
    ledger = Ledger(run.workspace)
    return Times.of(spans(ledger.history()))


def test_prometheus_has_what_the_ledger_has(scraped, times):
    run, prometheus = scraped
    for phase, seconds in asdict(times).items():
        found = prometheus.value(f'run_seconds{{phase="{phase}"}}')
        # Another clock writes the stream only if it was set back.
        assert found == pytest.approx(seconds, abs=0.01), phase
    assert prometheus.value("goodput") == pytest.approx(times.goodput, abs=0.001)
    assert prometheus.value("cost_usd_total") == pytest.approx(times.cost(PRICE), abs=1e-4)
    assert prometheus.value("attempts_total") == len(events_of(run.workspace, AttemptStarted)) == 3
    saved = events_of(run.workspace, CheckpointSaved)
    assert prometheus.value("checkpoint_size_mb_count") == len(saved)
    assert prometheus.value("checkpoint_size_mb_sum") == pytest.approx(
        sum(item.bytes for item in saved) / 1e6
    )
    assert prometheus.value("sum(lost_seconds_total)") == pytest.approx(times.lost, abs=0.01)
    assert prometheus.value("run_active") == 0
    assert prometheus.value("training_step") == 120


def test_phases_of_the_steps_are_measured(scraped):
    run, prometheus = scraped
    seconds = {
        item["metric"]["phase"]: float(item["value"][1])
        for item in prometheus.query("step_seconds_total")
    }
    assert min(seconds[phase] for phase in ("forward", "backward", "validation", "checkpoint")) > 0
    assert seconds["validation"] == pytest.approx(
        sum(item.seconds for item in events_of(run.workspace, Validated))
    )
    assert prometheus.value("gpu_utilization") is None


def test_counters_never_went_back(scraped):
    _, prometheus = scraped
    counted = [name for name, metric in SERIES.items() if metric.kind != "gauge"]
    known = [name for name in counted if prometheus.query(name)]
    assert {"cost_usd_total", "lost_seconds_total", "checkpoint_size_mb_bucket"} <= set(known)
    for name in known:
        assert prometheus.query(f"resets({name}[1h]) > 0") == [], name
    assert prometheus.value("changes(attempts_total[1h])") >= 1


def test_duration_was_observed_once(scraped, times):
    _, prometheus = scraped
    assert prometheus.value("training_duration_seconds_count") == 1
    assert prometheus.value("max_over_time(training_duration_seconds_count[1h])") == 1
    assert prometheus.value("training_duration_seconds_sum") == pytest.approx(times.wall, abs=0.01)


def test_collector_has_one_trace_and_the_same_counters(scraped, times, collector):
    assert len({span.trace_id for span in collector.spans}) == 1
    attempts = {
        attributes(span)["steadytrain.attempt"]: attributes(span)["steadytrain.outcome"]
        for span in collector.named("attempt")
    }
    assert attempts == {1: "failed", 2: "failed", 3: "finished"}
    observed = [sum(item.bucket_counts) for item in collector.points("training_duration_seconds")]
    assert set(observed[-1:]) == {1}
    assert set(observed) <= {0, 1}
    for name in ("attempts", "cost_usd", "tokens"):
        values = [item.as_double for item in collector.points(name)]
        assert values == sorted(values), name
    assert collector.points("cost_usd")[-1].as_double == pytest.approx(times.cost(PRICE), abs=1e-4)
