"""Score a model of a table, load it, and log it to MLflow."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.encoder import parsed
from steadytrain.components.tabular.model import TableModel, load, plain_number
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.scoring.classification import (
    class_scores,
    label_indices,
    score_class_frequencies,
)
from steadytrain.components.tasks.scoring.regression import RegressionScorer

_ARTIFACT: Final = "model"
_EXAMPLES: Final = 3


class TableClassScorer:
    """Scores predicted classes."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        del config
        self.data = data

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        truth = label_indices(records, self.data.labels)
        return class_scores(records, truth, _outputs(components, records))

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        return score_class_frequencies(self.data, records)


class TableNumberScorer(RegressionScorer):
    """Scores predicted numbers."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        found = _outputs(components, records)
        return self._table(records, records.column("label").to_numpy(), found, found)


def _outputs(components: Components, records: pa.Table) -> Any:
    model: TableModel = components["model"]
    return model.outputs(parsed(records), strict=False)


class TablePackager:
    """Loads what learners export, and logs it to MLflow with its preparation inside."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        del config
        self.data = data

    def load_exported(self, folder: Path) -> Components:
        """Load a model, with the code of this version and not with that in the folder.

        Raises:
            BadInput: it cannot be read, or its classes are not those of the data.
        """
        try:
            model = load(folder)
        except (OSError, ValueError, KeyError) as error:
            raise BadInput(
                f"{folder} has no model of a table that can be read: {error}",
                remedy="train it again, or restore the folder",
            ) from error
        if model.labels != self.data.labels:
            raise BadInput(
                f"the model predicts the classes {', '.join(model.labels) or 'of no column'}, and "
                f"the data have {', '.join(self.data.labels) or 'none'}",
                remedy="name the classes in data.labels, or register under another name",
            )
        return {"model": model}

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        import mlflow
        import pandas as pd

        model: TableModel = self.load_exported(folder)["model"]
        example = pd.DataFrame(
            {
                name: [
                    plain_number(record.get(name)) if kind == "number" else record.get(name)
                    for record in parsed(records.slice(0, _EXAMPLES))
                ]
                for name, kind in model.preparation.kinds.items()
            }
        )
        needed = ["mlflow", "numpy", "pandas", *model.libraries]
        logged = mlflow.pyfunc.log_model(
            name=name,
            python_model=str(Path(__file__).with_name("served.py")),
            artifacts={_ARTIFACT: str(folder)},
            signature=_signature(model),
            input_example=example,
            metadata=metadata,
            pip_requirements=[f"{package}=={version(package)}" for package in needed],
        )
        return str(logged.model_uri)

    def load_logged(self, model_uri: str) -> Components:
        # Only the files: MLflow's own load_model would run the code that is registered with them.
        import mlflow

        with tempfile.TemporaryDirectory() as scratch:
            place = mlflow.artifacts.download_artifacts(model_uri, dst_path=scratch)
            return self.load_exported(Path(place) / "artifacts" / _ARTIFACT)


def _signature(model: TableModel) -> Any:
    """Return the columns of records and of predictions. No record must have every column."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    kinds = {"number": "double", "date": "string", "category": AnyType()}
    given = [
        ColSpec(kinds[kind], name, required=False) for name, kind in model.preparation.kinds.items()
    ]
    found = [ColSpec("string" if model.labels else "double", "prediction")]
    found += [ColSpec("double", f"probability_{label}") for label in model.labels]
    return ModelSignature(Schema(given), Schema(found))
