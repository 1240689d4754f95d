"""How the winner of a search was judged: on the test side, once, and as an exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from steadytrain.components.automl.results import BOARD
from steadytrain.components.automl.unit_scores import missed_limits
from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.shared.config import load
from steadytrain.components.shared.quantities import number, size
from steadytrain.components.shared.records import (
    DataRecord,
    EvaluationRecord,
    GateRecord,
    TrainRecord,
)
from steadytrain.components.shared.stage import quiet
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import OpenTask

_ANSWERS: Final = 200
"""Records or series that are predicted one by one."""


def judged(workspace: Workspace) -> dict[str, Any]:
    """Return how a run's model was judged.

    Raises:
        BadInput: the run was not evaluated.
    """
    evaluation = EvaluationRecord.load(workspace.record("evaluate"))
    gate, train = (
        GateRecord.load(workspace.record("gate")),
        TrainRecord.load(workspace.record("train")),
    )
    data = DataRecord.load(workspace.record("preprocess"))
    stored = open_batches(data.path(data.test_records))
    records = pa.Table.from_batches([item.checked() for item in stored])
    config = load(workspace.config)
    quiet()
    artifact = OpenTask(config, data).packager.measured(Path(train.model), records, most=_ANSWERS)
    limits = config.automl.constraints
    return {
        "run": workspace.run_id,
        "test": {
            "metric": gate.metric,
            "examples": evaluation.examples,
            "metrics": {name: item.model_dump() for name, item in evaluation.metrics.items()},
            "promoted": gate.promoted,
            "gate": gate.reason,
            "compared": gate.compared,
            "champion": gate.champion,
            "improvement": gate.improvement and gate.improvement.model_dump(),
            "confidence": gate.confidence,
        },
        "artifact": artifact.model_dump(),
        # The search knew the models of the folds, which learned from fewer records.
        "missed": missed_limits([artifact], limits),
    }


def add_judgment(found: Mapping[str, Any], folder: Path) -> None:
    """Add it to the board in a study's folder."""
    board = json.loads((folder / BOARD).read_bytes())
    text = json.dumps({**board, **found}, indent=2)
    LocalStorage(folder).write(BOARD, f"{text}\n".encode())


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return it as lines of text."""
    test, artifact = found["test"], found["artifact"]
    metrics = [
        f"{name} {number(item['value'])} ({number(item['low'])} to {number(item['high'])})"
        for name, item in test["metrics"].items()
    ]
    memory = artifact["memory_mb"]
    return [
        f"test side: {test['examples']:,} records, opened once: {', '.join(metrics)}",
        f"model: {number(artifact['latency_p50_ms'])} ms for a record, "
        f"{number(artifact['latency_p99_ms'])} ms at the 99th percentile, "
        f"{'' if memory is None else f'{size(memory * 1e6)} of memory, '}"
        f"{size(artifact['size_mb'] * 1e6)}",
        *(
            [f"limits: the registered model misses one: {missed}"]
            if (missed := found["missed"])
            else []
        ),
    ]
