"""Adapt KFP artifacts to the evaluate step, and its records to KFP artifacts."""

from __future__ import annotations

import shutil
from pathlib import Path

from kfp import dsl

from steadytrain.components.evaluate.step import run
from steadytrain.components.shared.config import load
from steadytrain.components.shared.records import DataRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace


def evaluate(
    *,
    resolved: dsl.Artifact,
    data: dsl.Dataset,
    model: dsl.Model,
    evaluation: dsl.Artifact,
    decision: dsl.Artifact,
    metrics: dsl.Metrics,
    classes: dsl.ClassificationMetrics,
    page: dsl.HTML,
) -> bool:
    """Run the step.

    Returns:
        Whether the gate lets the candidate become champion.
    """
    config = load(Path(resolved.path))
    workspace = Workspace.of(config)
    judged, gate = run(config, DataRecord.load(Path(data.path)), TrainRecord.load(Path(model.path)))
    shutil.copyfile(workspace.record("evaluate"), evaluation.path)
    shutil.copyfile(workspace.record("gate"), decision.path)
    shutil.copyfile(workspace.evaluation / "evaluation.html", page.path)
    decision.metadata.update(promoted=gate.promoted, reason=gate.reason)
    for name, interval in judged.metrics.items():
        metrics.log_metric(name, interval.value)
    for name, value in judged.baselines.items():
        metrics.log_metric(f"baseline_{name}", value)
    for name, reached in judged.tasks.items():
        metrics.log_metric(name, reached.value)
    if judged.confusion:
        classes.log_confusion_matrix(judged.labels, judged.confusion)
    return gate.promoted
