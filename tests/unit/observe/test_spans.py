"""A run's spans follow from its events alone, so whoever builds them has the same ones."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from steadytrain.components.observe.otlp.exports import SpanReader
from steadytrain.components.observe.otlp.spans import RunSpans, left_out
from steadytrain.components.shared.environment import TRACEPARENT
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    CheckpointSaved,
    DecisionMade,
    PodWaited,
    StepStarted,
    TrainingStarted,
    TrainingStep,
)
from steadytrain.components.shared.tracking.notes import Trace, attempt_span, attempt_traceparent

from support.decided import halved
from support.written_run import Writer

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


@pytest.fixture
def pipeline(make_config):
    """A run of a whole pipeline whose first attempt failed, and that was started twice."""
    run = Writer(make_config())
    run.again()
    run.preprocess()
    run.start_step("train")
    run.clock += 0.1
    run.attempt(1, last=230, max_steps=500, outcome="failed", failure_class="gpu_oom")
    decided = {"action": "retry_changed", "reason": "why", "delay_seconds": 2.0}
    run.emit("supervisor", DecisionMade, attempt=1, failure_class="gpu_oom", **decided)
    run.attempt(2, first=200, last=360, max_steps=500, outcome="preempted")
    run.again()
    run.start_step("train")
    run.clock += 0.1
    run.attempt(3, first=300, last=500, max_steps=500)
    run.finish("train", 1.0)
    run.start_step("report")
    run.finish("report", 1.0)
    return run


def spans_of(run):
    return list(SpanReader(run.workspace.events, Trace.of(run.workspace), {}).new())


def of_attempt(spans, attempt, trace):
    return [span for span in spans if span.parent == attempt_span(trace, attempt)]


def test_every_part_of_a_run_has_one_span_below_its_whole(pipeline):
    spans, trace = spans_of(pipeline), Trace.of(pipeline.workspace)
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    counts = Counter(span.name for span in spans)
    saved = [
        item for item in read_events(pipeline.workspace.events) if type(item) is CheckpointSaved
    ]
    assert counts["checkpoint"] == counts["validation"] == len(saved)
    assert counts["first step"] == counts["attempt"] == 3
    assert (counts["pipeline run"], counts["recovery decision"]) == (2, 1)
    assert counts["step train"] == counts["step begin"] == 2
    first, again = (span for span in spans if span.name == "pipeline run")
    assert (first.id, first.parent, again.parent) == (trace.span_id("run"), "", first.id)
    assert (first.error, again.error) == ("interrupted", "")
    for span in spans:
        assert span.end >= span.start
        assert span is first or span.parent in by_id, span
    parents = {span.name: by_id[span.parent].name for span in spans if span.parent}
    assert parents["step train"] == "pipeline run"
    assert parents["attempt"] == parents["recovery decision"] == "step train"
    assert parents["steps"] == parents["checkpoint"] == "attempt"


def test_steps_are_sampled_except_those_of_a_failed_attempt(pipeline):
    spans, trace = spans_of(pipeline), Trace.of(pipeline.workspace)
    reports = Counter(
        event.attempt
        for event in read_events(pipeline.workspace.events)
        if isinstance(event, TrainingStep)
    )
    recorded = {
        attempt: len([span for span in of_attempt(spans, attempt, trace) if "step" in span.name])
        for attempt in reports
    }
    assert recorded[1] == reports[1] == 23
    assert 1 <= recorded[2] + recorded[3] < 0.4 * (reports[2] + reports[3])


def test_one_step_of_ten_is_sampled():
    trace = Trace("run", "1" * 32)
    events = [
        TrainingStep(
            time=float(step),
            attempt=1,
            step=step,
            epoch=0.0,
            loss=1.0,
            learning_rate=0.1,
            grad_norm=1.0,
            tokens=step,
            tokens_per_second=1.0,
            gpu_memory_used=0,
            memory_used=1,
        )
        for step in range(1, 5001)
    ]
    started = TrainingStarted(
        time=0.0, attempt=1, step=0, max_steps=1, parameters=1, device="cpu", precision="fp32"
    )
    assert len(list(left_out(trace, 1, [started, *events]))) == pytest.approx(4500, abs=100)
    unsampled = Trace("run", "1" * 32, sampled=False)
    assert len(list(left_out(unsampled, 1, [started, *events]))) == 4999


def test_rebuilt_spans_are_the_same_wherever_the_first_reader_stopped(pipeline):
    folder, trace = pipeline.workspace.events, Trace.of(pipeline.workspace)
    everything = spans_of(pipeline)
    for stop in (1, 5, 20, len(everything) - 1):
        first = SpanReader(folder, trace, {})
        source = first.new()
        seen = [next(source) for _ in range(stop)]
        rest = list(SpanReader(folder, trace, first.cursor.position).new())
        merged = {span.id: span for span in [*seen, *rest]}
        assert merged == {span.id: span for span in everything}
        # Only what one event has completed may come twice.
        assert len(seen) + len(rest) - len(merged) <= 25


def test_live_reader_has_the_same_spans_as_one_that_comes_later(make_config, pipeline):
    """It reads while the files grow, a line of one file at a time."""
    source, trace = pipeline.workspace.events, Trace.of(pipeline.workspace)
    live = Writer(make_config(run="live"))
    live.workspace.events.mkdir(parents=True)
    reader, seen = SpanReader(live.workspace.events, trace, {}), []
    for path in sorted(source.glob("*.jsonl")):
        (live.workspace.events / path.name).touch()
    lines = sorted(
        (float(re.search(r'"time": ?([\d.]+)', line)[1]), path.name, line)
        for path in source.glob("*.jsonl")
        for line in path.read_text().splitlines(keepends=True)
    )
    for _, name, line in lines:
        with (live.workspace.events / name).open("a") as handle:
            handle.write(line)
        seen += reader.new()
    assert Counter(span.id for span in seen) == Counter(span.id for span in spans_of(pipeline))


def test_failed_attempt_names_its_class(pipeline):
    failed = [span for span in spans_of(pipeline) if span.name == "attempt" and span.error]
    (failure,) = failed
    assert failure.attributes["error.type"] == "gpu_oom"
    (decision,) = (span for span in spans_of(pipeline) if span.name == "recovery decision")
    assert decision.attributes["steadytrain.action"] == "retry_changed"
    assert decision.start == pytest.approx(failure.end)


def test_repeated_step_is_a_decision_within_its_attempt(make_config):
    run = Writer(make_config())
    run.attempt(1, last=10, max_steps=500, outcome="preempted")
    run.record("rank-0", halved(size=4, time=run.clock - 1))
    (decision,) = (span for span in spans_of(run) if span.name == "recovery decision")
    assert decision.parent == attempt_span(Trace.of(run.workspace), 1)
    assert decision.attributes["steadytrain.action"] == "repeat_step"


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((10.0, 15.0, 18.0, 30.0), {"queueing": 5, "admission": 3, "image pull": 12}),
        ((10.0, 15.0, 0.0, 0.0), {"queueing": 5, "admission": 85}),
        ((10.0, 0.0, 0.0, 0.0), {"queueing": 90}),
    ],
)
def test_waits_for_a_pod_are_spans_and_the_unfinished_one_has_an_error(times, expected):
    trace = Trace("run", "1" * 32)
    created, admitted, scheduled, started = times
    event = PodWaited(
        time=100.0,
        attempt=2,
        node=1,
        created=created,
        admitted=admitted,
        scheduled=scheduled,
        started=started,
    )
    spans = list(RunSpans(trace).add(event))
    assert {span.name: span.end - span.start for span in spans} == expected
    assert [bool(span.error) for span in spans].count(True) == (0 if started else 1)
    assert {span.parent for span in spans} == {attempt_span(trace, 2)}


def test_rendezvous_ends_when_the_ranks_have_joined(make_config):
    run = Writer(make_config())
    run.start_step("train")
    run.attempt(1, last=10, max_steps=10)
    (path,) = run.workspace.events.glob("rank-0.jsonl")
    ready = next(
        item for item in read_events(run.workspace.events) if type(item) is TrainingStarted
    )
    path.write_text(path.read_text().replace('"joined": 0.0', f'"joined": {ready.time - 2.0}'))
    found = {span.name: span for span in spans_of(run)}
    assert found["set-up"].end - found["set-up"].start == pytest.approx(2.0)
    assert found["rendezvous"].end == found["set-up"].start


def test_first_process_of_a_run_joins_the_callers_trace_and_later_ones_stay(
    make_config, monkeypatch
):
    workspace = Writer(make_config()).workspace
    monkeypatch.setenv(TRACEPARENT, f"{CALLER}-01")
    trace = Trace.of(workspace)
    assert f"00-{trace.trace_id}-{trace.caller}" == CALLER
    monkeypatch.setenv(TRACEPARENT, "00-1bf7651916cd43dd8448eb211c80319c-b7ad6b7169203332-01")
    assert Trace.of(workspace) == trace
    assert attempt_traceparent(workspace, 3) == trace.traceparent(attempt_span(trace, 3))


def test_span_in_the_configuration_comes_before_the_variable(make_config, monkeypatch):
    monkeypatch.setenv(TRACEPARENT, "00-1bf7651916cd43dd8448eb211c80319c-b7ad6b7169203332-01")
    config = make_config(observability={"traceparent": f"{CALLER}-01"})
    trace = Trace.of(Writer(config).workspace, config.observability.traceparent)
    assert f"00-{trace.trace_id}-{trace.caller}" == CALLER
    assert config.digest() == make_config().digest()


def test_span_that_is_none_is_rejected(make_config):
    with pytest.raises(ConfigError, match=r"observability\.traceparent.*\n?.*00-0af7651916cd"):
        make_config(observability={"traceparent": "00-xyz"})


def test_unsampled_caller_reaches_the_pods(make_config, monkeypatch):
    monkeypatch.setenv(TRACEPARENT, f"{CALLER}-00")
    workspace = Writer(make_config()).workspace
    assert attempt_traceparent(workspace, 1).endswith("-00")


@pytest.mark.parametrize(
    "value", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", f"ff{CALLER[2:]}-01"]
)
def test_invalid_traceparent_is_ignored(make_config, monkeypatch, value):
    monkeypatch.setenv(TRACEPARENT, value)
    workspace = Writer(make_config()).workspace
    trace = Trace.of(workspace)
    assert trace.caller == ""
    assert re.fullmatch("[0-9a-f]{32}", trace.trace_id)
    assert Trace.of(workspace) == trace


def test_runs_of_one_name_in_two_folders_have_two_traces(make_config, tmp_path):
    here = Writer(make_config()).workspace
    there = Writer(make_config(output=str(tmp_path / "elsewhere"))).workspace
    assert Trace.of(here).trace_id != Trace.of(there).trace_id


def test_step_that_was_killed_ends_with_the_next_start_of_it(make_config):
    run = Writer(make_config())
    run.start_step("evaluate")
    run.clock += 5
    run.emit("evaluate", StepStarted, stage="evaluate")
    (lost,) = spans_of(run)
    assert (lost.name, lost.error) == ("step evaluate", "interrupted")
