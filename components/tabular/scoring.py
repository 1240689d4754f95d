"""Score a model of a table, load it, and log it to MLflow."""

from __future__ import annotations

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
from steadytrain.components.tasks.served import ServedPackager

_EXAMPLES: Final = 3


class TableClassScorer:
    """Scores predicted classes."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        del config
        self.data = data

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        truth = label_indices(records, self.data.labels)
        found = _outputs(components, records)
        return class_scores(records, truth, found, components["model"].decided(found))

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


class TablePackager(ServedPackager):
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
        self.check_labels(model.labels)
        return {"model": model}

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        import pandas as pd
        from mlflow.types import ColSpec
        from mlflow.types.schema import AnyType

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
        # A date may be text, or a date of pandas, and a text may be missing.
        types = dict.fromkeys(("date", "category", "text"), AnyType()) | {"number": "double"}
        return self.log_folder(
            folder,
            name=name,
            # No record must have every column.
            inputs=[
                ColSpec(types[kind], name, required=False)
                for name, kind in model.preparation.kinds.items()
            ],
            example=example,
            metadata=metadata,
            packages=["mlflow", "numpy", "pandas", *model.libraries],
        )
