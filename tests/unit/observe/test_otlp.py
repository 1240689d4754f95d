"""A real receiver of OTLP has each span once and every point, however it behaves meanwhile."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from steadytrain.components.observe.otlp import exports as collector_module
from steadytrain.components.observe.otlp import exports as snapshots_module
from steadytrain.components.observe.otlp.exports import SpanReader
from steadytrain.components.observe.otlp.sink import OtlpSink
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.report.step import send_unsent
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.tracking import pull_sink
from steadytrain.components.shared.tracking.notes import Trace
from steadytrain.components.shared.workspace import Workspace

from support.command import wait_for
from support.otlp import attributes, receiving
from support.ports import free_port
from support.written_run import Writer


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(pull_sink, "FIRST_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(pull_sink, "LAST_DELAY_SECONDS", 0.2)
    monkeypatch.setattr(pull_sink, "CLOSE_SECONDS_UNANSWERED", 300.0)
    monkeypatch.setattr(collector_module, "TIMEOUT_SECONDS", 300.0)


@pytest.fixture
def receiver():
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def opened():
    """Open sinks that look for events often, and close them at the end."""
    with contextlib.ExitStack() as stack:

        def start(config):
            sink = OtlpSink(config, Workspace.of(config), batch_seconds=0.05, close_seconds=300)
            stack.callback(sink.close)
            return sink

        yield start


def configured(make_config, endpoint, **sections):
    return make_config(
        tracking={"sinks": ["otlp"]}, observability={"otlp_endpoint": endpoint}, **sections
    )


def expected(workspace):
    """Return the ids of the run's spans."""
    spans = SpanReader(workspace.events, Trace.of(workspace), {}).new()
    return Counter(bytes.fromhex(span.id) for span in spans)


def received(receiver):
    return Counter(span.span_id for span in receiver.spans)


def warnings(workspace):
    return [event.message for event in read_events(workspace.events) if isinstance(event, Warned)]


def test_receiver_has_each_span_once_in_one_trace(make_config, written, receiver, opened):
    config = configured(make_config, receiver.endpoint)
    opened(config).close()
    assert received(receiver) == expected(written.workspace)
    trace = Trace.of(written.workspace)
    assert {span.trace_id.hex() for span in receiver.spans} == {trace.trace_id}
    (failed,) = (span for span in receiver.named("attempt") if span.status.code == 2)
    assert attributes(failed)["error.type"] == "gpu_oom"
    assert warnings(written.workspace) == []
    opened(config).close()
    assert received(receiver) == expected(written.workspace)


def test_metrics_are_those_of_prometheus(make_config, written, receiver, opened):
    opened(configured(make_config, receiver.endpoint)).close()
    metrics = RunMetrics.of(read_events(written.workspace.events)).current()
    newest = {}
    for metric in receiver.metrics:
        for point in receiver.points(metric.name):
            labels = attributes(point)
            assert (labels.pop("run"), labels.pop("model")) == ("tiny-1", "tiny")
            newest[metric.name, *labels.values()] = point
    for (name, *labels), point in newest.items():
        if name == "cost_budget_usd":
            continue
        if name in metrics.distributions:
            found = metrics.distributions[name]
            assert (list(point.bucket_counts), point.sum) == (found.counts, found.sum)
            assert not point.HasField("min")
        else:
            known = metrics.values[name, labels[0] if labels else ""]
            assert point.as_double == pytest.approx(known), name
    assert {name for name, *_ in newest} >= {"cost_usd", "training_loss", "goodput", "run_active"}


def test_points_of_an_outage_arrive_at_their_own_times(make_config, written, opened, monkeypatch):
    monkeypatch.setattr(collector_module, "TIMEOUT_SECONDS", 0.5)
    port = free_port()
    config = configured(make_config, f"http://127.0.0.1:{port}")
    sink = opened(config)
    wait_for(lambda: warnings(written.workspace))
    monkeypatch.setattr(collector_module, "TIMEOUT_SECONDS", 300.0)
    with receiving(port) as receiver:
        wait_for(lambda: receiver.points("training_step"))
        sink.close()
        points = receiver.points("training_step")
        times = [point.time_unix_nano for point in points]
        assert times == sorted(times)
        steps = [int(point.as_double) for point in points]
        assert len(set(steps)) > 10
        cost = [point.as_double for point in receiver.points("cost_usd")]
        assert cost == sorted(cost)
        assert len({point.start_time_unix_nano for point in receiver.points("cost_usd")}) == 1
        assert received(receiver) == expected(written.workspace)
    (message,) = warnings(written.workspace)
    assert f"http://127.0.0.1:{port} does not accept" in message
    assert "training continues" in message


@pytest.mark.parametrize("status", [503, 401])
def test_collector_that_refuses_for_a_while_gets_everything_once(
    make_config, written, receiver, opened, status
):
    receiver.status = status
    sink = opened(configured(make_config, receiver.endpoint))
    wait_for(lambda: receiver.asked.total() > 1)
    Writer(make_config(), clock=time.time()).start_step("evaluate")
    receiver.status = 200
    wait_for(lambda: received(receiver) == expected(written.workspace))
    sink.close()
    assert received(receiver) == expected(written.workspace)


def step_of(make_config, stage):
    """Add a step to the run whose span is complete."""
    later = Writer(make_config(), clock=time.time())
    later.start_step(stage)
    later.finish(stage, 1.0)


def test_batch_that_is_rejected_for_good_is_dropped_and_reported_once(
    make_config, written, receiver, opened
):
    receiver.status = 400
    sink = opened(configured(make_config, receiver.endpoint))
    wait_for(lambda: len(warnings(written.workspace)) == 2)
    count = expected(written.workspace).total()
    step_of(make_config, "evaluate")
    dropped = expected(written.workspace)
    wait_for(lambda: receiver.asked["/v1/traces"] > 1)
    receiver.status = 200
    step_of(make_config, "register")
    new = expected(written.workspace) - dropped
    wait_for(lambda: received(receiver) == new)
    sink.close()
    assert received(receiver) == new
    of_spans, of_metrics = warnings(written.workspace)
    assert f"{count} spans for good (HTTP 400); such batches are dropped" in of_spans
    assert "metrics for good (HTTP 400)" in of_metrics


@pytest.mark.timeout(300)
def test_collector_that_hangs_delays_nothing_and_loses_nothing(
    make_config, written, receiver, monkeypatch
):
    receiver.hangs = threading.Event()
    config = configured(make_config, receiver.endpoint)
    # So that it is abandoned in the middle of a request.
    monkeypatch.setattr(collector_module, "TIMEOUT_SECONDS", 600)
    sink = OtlpSink(config, written.workspace, batch_seconds=0.05, close_seconds=0.3)
    wait_for(lambda: receiver.asked.total())
    sink.close()
    assert "has not answered" in warnings(written.workspace)[0]
    receiver.hangs.set()
    receiver.hangs = None
    # What hung may be accepted yet, and its answer is lost: then the same spans come again.
    assert send_unsent(config, written.workspace)
    assert set(received(receiver)) == set(expected(written.workspace))


def test_end_of_a_run_sends_what_its_sink_could_not(
    make_config, written, receiver, opened, monkeypatch
):
    receiver.status = 503
    # Until then, the client repeats what was refused.
    monkeypatch.setattr(collector_module, "TIMEOUT_SECONDS", 0.5)
    config = configured(make_config, receiver.endpoint)
    opened(config).close()
    assert not send_unsent(config, written.workspace)
    assert "`steadytrain report` sends the rest" in warnings(written.workspace)[-1]
    receiver.status = 200
    monkeypatch.setattr(collector_module, "TIMEOUT_SECONDS", 300.0)
    assert send_unsent(config, written.workspace)
    assert received(receiver) == expected(written.workspace)


@pytest.mark.slow
def test_report_step_sends_the_rest_without_the_packages_of_training(
    make_config, written, receiver
):
    """The image of the report step has only the packages of `steadytrain[data]`."""
    config = configured(make_config, receiver.endpoint)
    missing = ("torch", "prometheus_client", "sqlalchemy", "mlflow.entities")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing}))
from steadytrain.components.report.step import send_unsent
from steadytrain.components.shared.config import load
from steadytrain.components.shared.workspace import Workspace
config = load(sys.argv[1])
assert send_unsent(config, Workspace.of(config))
"""
    subprocess.run([sys.executable, "-c", code, config.to_yaml()], check=True)
    assert received(receiver) == expected(written.workspace)


def test_run_without_the_sink_asks_no_collector(make_config, written, receiver):
    config = make_config(observability={"otlp_endpoint": receiver.endpoint})
    assert send_unsent(config, written.workspace)
    assert receiver.asked.total() == 0


def test_live_metrics_continue_while_no_event_arrives(
    make_config, written, receiver, opened, monkeypatch
):
    monkeypatch.setattr(snapshots_module, "EVERY_SECONDS", 0.1)
    sink = opened(configured(make_config, receiver.endpoint))
    wait_for(lambda: len(receiver.points("run_active")) > 60)
    sink.close()
    newest = receiver.points("run_active")[-1]
    assert abs(newest.time_unix_nano / 1e9 - time.time()) < 600


def test_secrets_are_in_nothing_that_is_sent(make_config, receiver, opened, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-0123456789")
    run = Writer(configured(make_config, receiver.endpoint))
    run.start_step("train")
    ending = {"failure_class": "user_bug", "message": "token canary-0123456789 rejected"}
    run.attempt(1, last=10, max_steps=500, outcome="failed", nan_at=(10,), **ending)
    run.fail("train", "RuntimeError", "canary-0123456789")
    opened(run.config).close()
    assert math.isnan(receiver.points("training_loss")[-1].as_double)
    assert receiver.named("step train")
    assert all(b"canary" not in body for body in receiver.raw)
    assert any(b"redacted" in body for body in receiver.raw)
