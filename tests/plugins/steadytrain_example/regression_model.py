"""The parts of the regression task that need torch or MLflow."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Batch, Components, LossSum, Row
from steadytrain.components.tasks.scoring.table import read_batches


class Regressor(torch.nn.Module):
    """Predicts a number. Features and target are standardized inside."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.sizes = {"features": features, "hidden": hidden}
        self.register_buffer("mean", torch.zeros(features + 1))
        self.register_buffer("deviation", torch.ones(features + 1))
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(features, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(rows, features) -> (rows,)"""
        found = self.layers((features - self.mean[:-1]) / self.deviation[:-1])
        return found.squeeze(-1) * self.deviation[-1] + self.mean[-1]


def load(folder: Path) -> Regressor:
    """Return an exported model."""
    model = Regressor(**json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def training_table(data: DataRecord) -> np.ndarray:
    """Return the training side, (rows, features + 1)."""
    parts = []
    for batch in read_batches(data, "train", ["features", "target"]):
        features = np.stack(batch.column("features").to_numpy(zero_copy_only=False))
        parts.append(np.column_stack([features, batch.column("target").to_numpy()]))
    return np.concatenate(parts)


class RegressionTraining:
    """Minimizes the squared error."""

    metric = "rmse"
    greater_is_better = False

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data

    def build_model(self) -> torch.nn.Module:
        table = training_table(self.data)
        model = Regressor(table.shape[1] - 1, self.config.model.config["hidden"])
        model.mean.copy_(torch.from_numpy(table.mean(axis=0)))
        model.deviation.copy_(torch.from_numpy(table.std(axis=0)).clamp(min=1e-6))
        return model

    def cost(self, row: Row) -> int:
        return len(row["features"])

    def collate(self, rows: Sequence[Row]) -> Batch:
        return {
            "features": torch.from_numpy(np.stack([row["features"] for row in rows])),
            "targets": torch.tensor([float(row["target"]) for row in rows]),
        }

    def weight(self, batch: Batch) -> int:
        return len(batch["targets"])

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        error = model(batch["features"]) - batch["targets"]
        return LossSum(error.square().sum())

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        return {"loss": self.compute_loss(model, batch).total.item(), "weight": self.weight(batch)}

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        mean = sums["loss"] / sums["weight"]
        return {"loss": mean, "rmse": mean**0.5}


class RegressionScorer:
    """Predicts the target of each test record."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.data = data

    @torch.inference_mode()
    def score(self, components: Components, records: pa.Table) -> pa.Table:
        model = components["model"]
        features = torch.tensor(records["features"].to_pylist())
        target = records["target"].to_numpy()
        error = model(features.to(model.mean.device)).cpu().numpy() - target
        return self._table(records, error)

    def score_baseline(self, records: pa.Table) -> pa.Table:
        mean = training_table(self.data)[:, -1].mean()
        return self._table(records, mean - records["target"].to_numpy())

    def _table(self, records: pa.Table, error: Any) -> pa.Table:
        return pa.table(
            {
                "id": records["id"],
                "group": records["group"],
                "slice": records["slice"],
                "loss": np.square(error, dtype=np.float64),
                "targets": np.ones(len(error), dtype=np.int64),
                "bytes": np.zeros(len(error), dtype=np.int64),
                "error": error,
            }
        )


class RegressionPackager:
    """Stores the weights next to the sizes of the model."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        pass

    def export(self, model: Regressor, folder: Path) -> None:
        save_file(model.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(model.sizes))

    def load_exported(self, folder: Path) -> Components:
        return {"model": load(folder)}

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        logged = mlflow.pyfunc.log_model(
            name=name,
            python_model=Served(),
            artifacts={file: str(folder / file) for file in ("model.safetensors", "config.json")},
            input_example=records["features"].to_pylist()[:1],
            metadata=metadata,
            pip_requirements=["steadytrain-example"],
        )
        return logged.model_uri

    def load_logged(self, model_uri: str) -> Components:
        folder = Path(mlflow.artifacts.download_artifacts(model_uri))
        return self.load_exported(folder / "artifacts")


class Served(mlflow.pyfunc.PythonModel):
    """Predicts for MLflow's clients, which have no run."""

    def load_context(self, context) -> None:
        self.model = load(Path(context.artifacts["config.json"]).parent)

    @torch.inference_mode()
    def predict(self, context, model_input: list[list[float]]) -> list[float]:
        return self.model(torch.tensor(model_input)).tolist()
