"""The registry names every metric once, with bounded labels."""

from __future__ import annotations

import re

import pytest

from steadytrain.components.observe.metrics import METRICS, SERIES, VALIDATION_PREFIX, Samples
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning
from steadytrain.components.tasks.sequence_classification import SequenceClassification

REQUIRED = {
    "training_duration_seconds": "histogram",
    "gpu_utilization": "gauge",
    "training_loss": "gauge",
    "learning_rate": "gauge",
    "checkpoint_size_mb": "histogram",
    "cost_usd": "counter",
}


def test_names_that_dashboards_of_others_rely_on():
    assert {name: METRICS[name].kind for name in REQUIRED} == REQUIRED
    assert tuple(METRICS["training_duration_seconds"].buckets) == (600, 3600, 14400, 86400)
    assert METRICS["cost_usd"].series == ("cost_usd_total",)


def test_names_are_those_of_prometheus_and_unique():
    assert len(SERIES) == sum(len(metric.series) for metric in METRICS.values())
    for metric in METRICS.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind == "histogram")


def test_labels_are_bounded():
    assert {metric.label for metric in METRICS.values()} == {"", "phase", "class"}
    assert all(bool(metric.values) == bool(metric.label) for metric in METRICS.values())


@pytest.mark.parametrize("act", ["set", "add", "observe"])
def test_only_metrics_of_the_registry_have_values(act):
    samples = Samples()
    with pytest.raises(KeyError):
        getattr(samples, act)("unheard_of", 1.0)


def test_metric_takes_only_its_own_kind_and_label():
    samples = Samples()
    for act, arguments in [
        ("set", ("cost_usd", 1.0)),
        ("add", ("training_loss", 1.0)),
        ("add", ("failures", 1.0)),
        ("set", ("training_loss", 1.0, "data")),
    ]:
        with pytest.raises(KeyError):
            getattr(samples, act)(*arguments)


def test_counter_never_decreases():
    samples = Samples()
    samples.add("tokens", 5)
    samples.add("tokens", -3)
    assert samples.values["tokens", ""] == 5


def test_value_on_a_bound_belongs_to_that_bucket():
    samples = Samples()
    for seconds in (1, 600, 601, 90_000):
        samples.observe("training_duration_seconds", seconds)
    assert samples.distributions["training_duration_seconds"].counts == [2, 1, 0, 0, 1]


@pytest.mark.parametrize("task", [SupervisedFineTuning, SequenceClassification])
def test_validation_metrics_of_our_tasks_are_exposed(task):
    scores = task.validation_metrics(None, {"loss": 1.0, "weight": 1.0, "correct": 1.0})
    assert {f"{VALIDATION_PREFIX}{name}" for name in scores} <= METRICS.keys()
