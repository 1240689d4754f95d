"""Pass KFP artifacts to the train step, and turn its record back into artifacts."""

from __future__ import annotations

import shutil
from pathlib import Path

from kfp import dsl

from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.records import DataRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.own_pod import with_task
from steadytrain.components.train.step import run_stage


def train(
    *,
    resolved: dsl.Artifact,
    data: dsl.Dataset,
    model: dsl.Model,
    result: dsl.Metrics,
    task: dsl.TaskConfig | None,
) -> None:
    """Run the step. The model stays in the workspace, and the artifact's metadata points to it."""
    config = with_task(load(Path(resolved.path)), task)
    publish(config, run_stage(config, DataRecord.load(Path(data.path))), model, result)


def publish(config: RunConfig, record: TrainRecord, model: dsl.Model, result: dsl.Metrics) -> None:
    """Describe a trained model in KFP artifacts."""
    shutil.copyfile(Workspace.of(config).record("train"), model.path)
    model.metadata.update(folder=record.model, weights_digest=record.weights_digest)
    result.log_metric(f"best_{record.metric}", record.best_score)
    result.log_metric("best_step", record.best_step)
    result.log_metric("steps", record.steps)
    result.log_metric("attempts", record.attempts)
    result.log_metric("seconds", round(record.seconds, 1))
