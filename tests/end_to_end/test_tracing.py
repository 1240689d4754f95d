"""A collector gets one trace and every counter of a run whose supervisor is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.report.step import send_unsent
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    CheckpointSaved,
    TrainingStep,
    Validated,
    Warned,
)

from support.command import paused_rank, wait_for
from support.otlp import attributes, receiving
from support.pause import Pause
from support.training import Bench, events_of, language_rows, write_data

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
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
def run(tmp_path_factory, collector):
    """A finished run whose collector was down at first, and whose supervisor was then killed."""
    root = tmp_path_factory.mktemp("tracing")
    data = write_data(root / "data", language_rows(60), language_rows(8, seed=1))
    training = {
        "max_steps": 100,
        "global_batch_size": 4,
        "learning_rate": 5e-3,
        "eval_steps": 50,
        "save_steps": 20,
        "logging_steps": 1,
    }
    made = Bench.make(
        root / "output",
        data,
        run="traced",
        training=training,
        compute={"device": "cpu", "threads_per_rank": 1},
        tracking={"sinks": ["otlp"]},
        observability={"otlp_endpoint": collector.endpoint},
    )
    made.workspace.create()
    made.workspace.config.write_text(made.config.to_yaml())
    made.data.save(made.workspace.record("preprocess"))
    command = [sys.executable, "-c", TRAIN, str(made.workspace.config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pause = Pause(root / "pause", 40)
    collector.status = 503
    first = subprocess.Popen(
        command, env={**environment, **pause.everywhere, "TRACEPARENT": CALLER}
    )
    paused_rank(pause, first)
    wait_for(lambda: collector.asked)
    assert not collector.spans
    collector.status = 200
    wait_for(lambda: collector.named("checkpoint"))
    first.kill()
    first.wait()
    second = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    # The report step does this, after which the train step's own span is complete.
    assert send_unsent(made.config, made.workspace)
    return made


def test_one_trace_has_every_part_of_both_supervisors_once(run, collector):
    assert {span.trace_id.hex() for span in collector.spans} == {CALLER[3:35]}
    spans = {span.span_id: span for span in collector.spans}
    # A batch comes again, with the same ids, only if the kill came before its answer was noted.
    again = [span.span_id for span in collector.spans]
    assert {again.count(span_id) for span_id in spans} <= {1, 2}
    named = Counter(span.name for span in spans.values())
    assert named["attempt"] == 2
    assert named["rendezvous"] == named["set-up"] == named["step train"] == 2
    assert named["checkpoint"] == len(events_of(run.workspace, CheckpointSaved))
    assert named["validation"] == len(events_of(run.workspace, Validated))
    attempts = {
        attributes(span)["steadytrain.attempt"]: span
        for span in spans.values()
        if span.name == "attempt"
    }
    assert attributes(attempts[2])["steadytrain.outcome"] == "finished"
    assert attempts[1].end_time_unix_nano <= attempts[2].start_time_unix_nano
    ids = {span.span_id for span in attempts.values()}
    reports = Counter(event.attempt for event in events_of(run.workspace, TrainingStep))
    assert named["first step"] == len(reports)
    (failed,) = (item for item in events_of(run.workspace, AttemptEnded) if item.failure_class)
    steps = Counter(span.parent_span_id for span in spans.values() if span.name == "steps")
    assert steps[attempts[failed.attempt].span_id] == reports[failed.attempt] - 1
    inside = [span for span in spans.values() if span.name in ("checkpoint", "steps", "rendezvous")]
    assert {span.parent_span_id for span in inside} <= ids


def test_counters_are_those_of_the_events(run, collector):
    metrics = RunMetrics.of(read_events(run.workspace.events)).current()
    assert collector.points("training_step")[-1].as_double == 100
    newest = {attributes(item).get("phase", ""): item for item in collector.points("step_seconds")}
    for phase, point in newest.items():
        assert point.as_double == pytest.approx(metrics.values["step_seconds", phase])
    assert sum(collector.points("training_duration_seconds")[-1].bucket_counts) == 1
    tokens = [item.as_double for item in collector.points("tokens")]
    assert tokens == sorted(tokens)


def test_outage_is_one_warning_for_each_supervisor(run):
    told = [event.message for event in events_of(run.workspace, Warned)]
    assert len([message for message in told if "OpenTelemetry collector" in message]) <= 1
