"""Plugins from another package work in a full run, and no product code mentions them."""

from __future__ import annotations

import json

import pytest

from steadytrain.components.shared.records import EvaluationRecord, GateRecord

from support.command import TINY_LM
from support.plugins import install_example


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return {"PYTHONPATH": str(install_example(tmp_path_factory.mktemp("example")))}


def records(done):
    folder = max(done.runs, key=lambda run: (run / "records" / "gate.json").stat().st_mtime)
    return (
        kind.load(folder / "records" / f"{name}.json")
        for name, kind in (("evaluate", EvaluationRecord), ("gate", GateRecord))
    )


def test_models_are_compared_by_a_metric_of_another_package(steadytrain, installed):
    sets = (*TINY_LM, "gate.metric=median_loss", "gate.floors={median_loss: 1.0e6}")
    first = steadytrain.run("causal-lm", *sets, **installed)
    assert first.code == 0, first.out + first.err
    evaluation, decision = records(first)
    median = evaluation.metrics["median_loss"]
    assert median.low <= median.value <= median.high
    assert decision.promoted
    assert decision.candidate == median.value
    assert evaluation.metrics["bits_per_token"].value == pytest.approx(
        evaluation.metrics["loss"].value / 0.6931471805599453
    )

    sinks = "tracking.sinks=[event_counts, mlflow, never_opens]"
    changed = ("training.learning_rate=1e-2", sinks)
    second = steadytrain.run("causal-lm", *sets, *changed, **installed)
    assert second.code == 0, second.out + second.err
    evaluation, decision = records(second)
    assert decision.metric == "median_loss"
    assert decision.champion == median.value
    better = evaluation.metrics["median_loss"].value < median.value
    assert (decision.improvement.value > 0) is better
    assert f"median loss {decision.candidate:.4g} against {median.value:.4g}" in second.out

    (counts,) = second.output.glob("runs/*/event-counts.json")
    assert json.loads(counts.read_text())["TrainingStep"] == 6
    assert "the sink 'never_opens' failed" in second.out + second.err

    without = steadytrain.run("causal-lm", *sets)
    assert without.code == 2
    assert "median_loss in steadytrain.metrics" in without.err
    assert "install the package" in without.err
