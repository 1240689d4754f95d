"""Score a model of a table, load it, and log it to MLflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.shared.artifact import Artifact, timed
from steadytrain.components.tabular.encoder import parsed
from steadytrain.components.tabular.model import TableModel, load, plain_number
from steadytrain.components.tasks.base import FEW, Components, Part
from steadytrain.components.tasks.scoring.classification import (
    ClassScorer,
    class_scores,
    label_indices,
)
from steadytrain.components.tasks.scoring.multi_label import (
    label_flags,
    label_scores,
    score_label_frequencies,
)
from steadytrain.components.tasks.scoring.thresholds import HALF
from steadytrain.components.tasks.scoring.whole_texts import RegressionScorer
from steadytrain.components.tasks.served import ServedPackager, readable

_EXAMPLES: Final = 3
_SURE: Final = -1e-15
"""The largest logarithm of a probability, so that its odds are finite."""


class TableClassScorer(ClassScorer):
    """Scores predicted classes."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        truth = label_indices(records, self.data.labels)
        outputs = _outputs(components, records)
        return class_scores(records, truth, outputs, components["model"].decided(outputs))


class TableLabelsScorer(Part):
    """Scores predicted sets of labels: each is predicted from the model's threshold on."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        truth, outputs = label_flags(records, self.data.labels), _outputs(components, records)
        model = components["model"]
        thresholds = np.array(model.decision or [HALF] * len(self.data.labels))
        predicted = model.decided(outputs)
        odds = outputs - np.log(-np.expm1(np.minimum(outputs, _SURE)))
        return label_scores(records, truth, odds, predicted, thresholds)

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        return score_label_frequencies(self.data, records, self.config.gate.metric)


class TableNumberScorer(RegressionScorer):
    """Scores predicted numbers. The loss is the squared error, as of the validation side."""

    unit = 1.0

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        outputs = _outputs(components, records)
        return self._table(records, records.column("label").to_numpy(), outputs, outputs)


def _outputs(components: Components, records: pa.Table) -> Any:
    model: TableModel = components["model"]
    return model.outputs(parsed(records), strict=False)


class TablePackager(ServedPackager):
    """Loads what learners export, and logs it to MLflow with its preparation inside."""

    def load_exported(self, folder: Path) -> Components:
        """Load a model, with the code of this version and not with that in the folder.

        Raises:
            BadInput: it cannot be read, or its classes are not those of the data.
        """
        with readable(folder, "a table"):
            model = load(folder)
        self.check_labels(model.labels)
        return {"model": model}

    def measured(self, folder: Path, records: pa.Table, *, most: int = FEW) -> Artifact:
        def opened() -> Callable[[Any], object]:
            model = load(folder)
            return lambda row: model.outputs([row], strict=False)

        return timed(folder, opened, parsed(records.slice(0, most)))

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        import pandas as pd
        from mlflow.types import ColSpec, DataType
        from mlflow.types.schema import AnyType, Array

        model: TableModel = self.load_exported(folder)["model"]
        examples = parsed(records.slice(0, _EXAMPLES))
        example = pd.DataFrame(
            {
                name: [
                    plain_number(record.get(name)) if kind == "number" else record.get(name)
                    for record in examples
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
            outputs=[
                ColSpec(Array(DataType.string), "prediction"),
                *(ColSpec("double", chance) for chance in model.names[1:]),
            ]
            if model.sets
            else (),
        )
