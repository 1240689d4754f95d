"""Trained runs that only need evaluation, with a task that needs no model library."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.digest import weights_digest
from steadytrain.components.shared.records import DataRecord, SideRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import Task, late
from steadytrain.components.tasks.encoding.plain_text import PlainTextEncoder

LABELS = ["circle", "square", "triangle"]


def _table(records: pa.Table, chances: Any, truth: list[int], scale: float = 1) -> pa.Table:
    count = len(truth)
    loss = -np.log(chances[np.arange(count), truth]) * scale
    return pa.table(
        {
            "id": records["id"],
            "group": pa.nulls(count, pa.string()),
            "slice": records["slice"],
            "loss": loss.astype(float),
            "targets": np.ones(count, dtype=np.int64),
            "bytes": np.zeros(count, dtype=np.int64),
            "label": truth,
            "prediction": chances.argmax(axis=1),
            "probabilities": pa.array(list(chances), pa.list_(pa.float32())),
        }
    )


class Shapes:
    """Classifies records without text; a model is just its share of correct answers."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.data = data

    def load_exported(self, folder: Path) -> dict[str, Any]:
        return {"model": json.loads((folder / "model.json").read_text())}

    def score(self, components: dict[str, Any], records: pa.Table) -> pa.Table:
        truth = [self.data.labels.index(label) for label in records["label"].to_pylist()]
        lucky = [zlib.crc32(item.encode()) / 2**32 for item in records["id"].to_pylist()]
        skill = components["model"]["skill"]
        found = [t if x < skill else (t + 1) % 3 for t, x in zip(truth, lucky, strict=True)]
        chances = np.full((len(truth), 3), 0.1, dtype=np.float32)
        chances[np.arange(len(truth)), found] = 0.8
        return _table(records, chances, truth, components["model"].get("scale", 1))

    def score_baseline(self, records: pa.Table) -> pa.Table:
        truth = [self.data.labels.index(label) for label in records["label"].to_pylist()]
        return _table(records, np.full((len(truth), 3), 1 / 3, dtype=np.float32), truth)

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        import mlflow

        class Served(mlflow.pyfunc.PythonModel):
            def predict(self, context: Any, model_input: list[str]) -> list[str]:
                return ["circle" for _ in model_input]

        logged = mlflow.pyfunc.log_model(
            name=name,
            python_model=Served(),
            artifacts={"model": str(folder / "model.json")},
            input_example=["a"],
            metadata=metadata,
            pip_requirements=[],
        )
        return str(logged.model_uri)

    def load_logged(self, model_uri: str) -> dict[str, Any]:
        import mlflow

        folder = mlflow.artifacts.download_artifacts(model_uri)
        return self.load_exported(Path(folder) / "artifacts")


SHAPES = Task(
    encoder=PlainTextEncoder,
    training=late("support.evaluating:NotTrained"),
    scorer=Shapes,
    packager=Shapes,
)


def make_config(output: Path, run: str, **sections: Any) -> RunConfig:
    """Return the config of a run with the shapes task."""
    return from_mapping(
        {
            "name": "shapes",
            "run": run,
            "output": str(output),
            "data": {"source": ["shapes"], "task": "support.evaluating:SHAPES"},
            "model": {"config": {"model_type": "none"}},
            "evaluation": {"bootstrap_samples": 200},
        }
        | sections
    )


def train(config: RunConfig, skill: float, **changes: Any) -> DataRecord:
    """Write what the steps before evaluation would: data, and a model with this skill."""
    workspace = Workspace.of(config)
    folder = workspace.prepared / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    examples = changes.pop("examples", 200)
    records = pa.table(
        {
            "id": [f"record-{index}" for index in range(examples)],
            "label": [LABELS[index % 3] for index in range(examples)],
            "slice": [["big", "small"][index % 4 == 0] for index in range(examples)],
        }
    )
    path = folder / "test.arrow"
    write_records(path, records)
    side = SideRecord(shards=[], rows=10, documents=10)
    content = {
        "folder": str(folder),
        "fingerprint": "prepared",
        "task": config.data.task,
        "sides": {"train": side},
        "test_records": path.name,
        "split_digest": "split",
        "labels": LABELS,
    }
    data = DataRecord(**(content | changes))
    data.save(workspace.record("preprocess"))
    workspace.model.mkdir(parents=True, exist_ok=True)
    (workspace.model / "model.json").write_text(json.dumps({"skill": skill}))
    (workspace.model / "model.safetensors").write_text(str(skill))
    TrainRecord(
        outcome="finished",
        model=str(workspace.model),
        weights_digest=weights_digest(workspace.model),
        metric="loss",
        best_score=1.0,
        best_step=5,
        steps=10,
        attempts=1,
        parameters=1,
        seconds=1.0,
    ).save(workspace.record("train"))
    return data


def write_records(path: Path, records: pa.Table) -> None:
    """Write the raw records of a test side."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, records.schema) as out:
        out.write_table(records)


def language_table(loss, targets, size, *, group=None, slices=None):
    count = len(loss)
    return pa.table(
        {
            "id": [str(index) for index in range(count)],
            "group": pa.array(group or [None] * count, pa.string()),
            "slice": pa.array(slices or [None] * count, pa.string()),
            "loss": pa.array(loss, pa.float64()),
            "targets": pa.array(targets, pa.int64()),
            "bytes": pa.array(size, pa.int64()),
        }
    )


def class_table(label, probabilities, **more):
    probabilities = np.asarray(probabilities)
    label = np.asarray(label)
    loss = -np.log(probabilities[np.arange(len(label)), label])
    table = language_table(loss, [1] * len(label), [0] * len(label), **more)
    return (
        table.append_column("label", pa.array(label, pa.int64()))
        .append_column("prediction", pa.array(probabilities.argmax(axis=1), pa.int64()))
        .append_column("probabilities", pa.array(list(probabilities), pa.list_(pa.float64())))
    )
