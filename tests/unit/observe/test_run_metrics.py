"""A run's metrics follow from its events alone, so they survive whoever counts them."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from steadytrain.components.observe.metrics import METRICS
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    GradientOverflow,
    SupervisorStarted,
    TrainingDiverged,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.train.recovery.times import Times, spans

from support.decided import halved

STEP = TrainingStep(
    time=20.0,
    attempt=1,
    step=10,
    epoch=0.5,
    loss=1.5,
    learning_rate=1e-3,
    grad_norm=0.7,
    tokens=1000,
    tokens_per_second=100.0,
    gpu_memory_used=0,
    memory_used=1000,
    data_wait=0.2,
    communication_wait=0.3,
    forward=0.1,
    backward=0.2,
    optimizer=0.1,
)


def counters(metrics):
    """Return what may never decrease, by name and label."""
    samples = metrics.current()
    found = {key: value for key, value in samples.values.items() if kind_of(key[0]) == "counter"}
    for name, item in samples.distributions.items():
        found |= {(name, f"bucket {at}"): count for at, count in enumerate(item.counts)}
        found[name, "sum"] = item.sum
    return found


def kind_of(name):
    return METRICS[name].kind


def value(metrics, name, label=""):
    return metrics.current().values[name, label]


def started(attempt=1, *, resumed=None, time=0.0):
    return AttemptStarted(
        time=time,
        attempt=attempt,
        world_size=2,
        batch=BatchSettings(4),
        gradient_accumulation_steps=1,
        resumed_from_step=resumed,
    )


def test_metrics_agree_with_the_ledger(written):
    history = written.ledger.history()
    times = Times.of(spans(history))
    metrics = RunMetrics.of(read_events(written.workspace.events))
    for phase, seconds in asdict(times).items():
        assert value(metrics, "run_seconds", phase) == pytest.approx(seconds), phase
    assert value(metrics, "goodput") == pytest.approx(times.goodput)
    assert value(metrics, "cost_usd") == pytest.approx(times.cost(36.0))
    lost = [value(metrics, "lost_seconds", name) for name in ("gpu_oom", "interrupted")]
    assert sum(lost) == pytest.approx(times.lost)
    assert min(lost) > 1
    assert value(metrics, "attempts") == 3
    assert value(metrics, "failures", "gpu_oom") == 1
    assert value(metrics, "run_active") == 0
    duration = metrics.current().distributions["training_duration_seconds"]
    assert (sum(duration.counts), duration.sum) == (1, pytest.approx(times.wall))


def test_counters_are_the_same_for_whoever_counts_from_the_start_and_never_decrease(written):
    events = read_events(written.workspace.events)
    lasting, before = RunMetrics(), {}
    for place, event in enumerate(events, start=1):
        lasting.add(event)
        rebuilt = counters(RunMetrics.of(events[:place]))
        assert rebuilt == counters(lasting)
        for key, count in before.items():
            assert rebuilt[key] >= count, (place, key)
        before = rebuilt


def test_event_that_is_known_changes_nothing(written):
    events = read_events(written.workspace.events)
    metrics = RunMetrics.of(events)
    before = dict(metrics.current().values), counters(metrics)
    for event in events:
        metrics.add(event)
    assert (metrics.current().values, counters(metrics)) == before


def test_price_that_changes_applies_to_later_attempts():
    def supervised(generation, price):
        settings = {"compute": {"price_per_hour": price}}
        return SupervisorStarted(
            time=0.0, generation=generation, pid=1, host="h", settings=settings
        )

    def ended(attempt, time):
        return AttemptEnded(time=time, attempt=attempt, outcome="preempted", step=0)

    first = [supervised(1, 3600.0), started(), ended(1, 10.0)]
    second = [supervised(2, 7200.0), started(2, time=50.0), ended(2, 55.0)]
    assert value(RunMetrics.of([*first, *second]), "cost_usd") == pytest.approx(10 + 2 * 5)
    late = replace(STEP, attempt=1, time=90.0)
    assert value(RunMetrics.of([*first, *second, late]), "cost_usd") == pytest.approx(20)


def test_without_a_price_there_is_no_cost():
    assert ("cost_usd", "") not in RunMetrics.of([started(), STEP]).current().values


def test_time_of_steps_is_split_by_what_they_waited_for():
    saved = CheckpointSaved(time=21, attempt=1, step=10, checkpoint="c", bytes=1, seconds=4.0)
    scores = {"loss": 1.25, "of_a_plugin": 3.0}
    checked = Validated(
        time=22, attempt=1, step=10, epoch=0.5, metrics=scores, best=True, seconds=7.0
    )
    metrics = RunMetrics.of([started(), STEP, saved, checked])
    found = {
        phase: value(metrics, "step_seconds", phase) for phase in METRICS["step_seconds"].values
    }
    assert found == pytest.approx(
        {
            "data": 2,
            "forward": 1,
            "backward": 2,
            "communication": 3,
            "optimizer": 1,
            "other": 1,
            "checkpoint": 4,
            "validation": 7,
        }
    )
    assert value(metrics, "validation_loss") == 1.25
    assert not any("of_a_plugin" in name for name, _ in metrics.current().values)


def test_gauges_show_the_newest_step_even_if_an_older_one_arrives_later():
    newest = replace(STEP, attempt=2, step=7, loss=0.5, time=30.0)
    metrics = RunMetrics.of([started(), started(2, resumed=5), newest, STEP])
    assert value(metrics, "training_loss") == 0.5
    assert value(metrics, "tokens") == 2000


def test_utilization_is_relative_to_the_data_sheet_of_the_gpu():
    ready = TrainingStarted(
        time=1,
        attempt=1,
        step=0,
        max_steps=10,
        parameters=10**9,
        device="NVIDIA H100 80GB HBM3",
        precision="bf16",
    )
    metrics = RunMetrics.of([started(), ready, replace(STEP, tokens_per_second=100_000.0)])
    assert value(metrics, "mfu") == pytest.approx(6e9 * 1e5 / (2 * 989.4e12), rel=0.01)
    unknown = RunMetrics.of([started(), replace(ready, device="cpu"), STEP])
    assert ("mfu", "") not in unknown.current().values


def test_run_is_active_while_it_will_try_again():
    def ended(**fields):
        return AttemptEnded(time=9, attempt=1, step=0, **fields)

    def decided(action):
        return DecisionMade(time=9, attempt=1, failure_class="network", action=action, reason="why")

    failed = ended(outcome="failed", failure_class="network")
    for active, events in [
        (1, []),
        (1, [failed]),
        (1, [failed, decided("retry")]),
        (0, [failed, decided("stop")]),
        (0, [ended(outcome="preempted")]),
        (0, [ended(outcome="finished")]),
    ]:
        assert value(RunMetrics.of([started(), *events]), "run_active") == active, events


def test_repeated_step_counts_as_a_failure_of_its_class():
    events = [started(), *(halved(size=size) for size in (4, 4, 2))]
    metrics = RunMetrics.of(events)
    assert value(metrics, "failures", "gpu_oom") == 2
    assert value(metrics, "micro_batch_size") == 2
    ended = AttemptEnded(time=9, attempt=1, step=0, outcome="failed", failure_class="data")
    stop = DecisionMade(time=9, attempt=1, failure_class="data", action="stop", reason="why")
    assert value(RunMetrics.of([*events, ended, stop]), "run_active") == 0


def test_faults_of_the_numbers_count_once():
    overflow = GradientOverflow(attempt=1, step=3, scale=2.0)
    diverged = TrainingDiverged(attempt=1, step=4, loss=float("nan"))
    metrics = RunMetrics.of([started(), overflow, overflow, diverged, diverged])
    assert value(metrics, "gradient_overflows") == 1
    assert value(metrics, "divergences") == 1


def test_clipped_steps_add_up_over_attempts_and_are_no_overflows():
    reports = [
        replace(STEP, attempt=attempt, step=step, tokens=step, clipped_steps=clipped)
        for attempt, step, clipped in [(1, 10, 3), (1, 20, 3), (1, 30, 9), (2, 40, 2)]
    ]
    often = GradientOverflow(attempt=1, step=30, clipped=0.9, steps=10)
    metrics = RunMetrics.of([started(), *reports[:3], often, started(2), reports[3], reports[3]])
    assert value(metrics, "gradients_clipped") == 11
    assert value(metrics, "gradient_overflows") == 0
