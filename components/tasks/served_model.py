"""A model of records as MLflow serves it. MLflow stores this file with the model.

It loads the model with the code that was exported with it, so that it needs no steadytrain.
"""

import importlib.util
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd


class Served(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Takes a frame of records, and returns one with predictions.

    Those of a model of series are of the times after these records.
    """

    def load_context(self, context: Any) -> None:
        folder = Path(context.artifacts["model"])
        code: Any = importlib.util.spec_from_file_location("exported_model", folder / "model.py")
        module = importlib.util.module_from_spec(code)
        code.loader.exec_module(module)
        self.model = module.load(folder)

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        del context, params
        plain = model_input.astype(object).where(model_input.notna(), None)
        # MLflow leaves neither columns nor rows of an array; no model takes a record without any.
        records = self.model.rows(plain.to_dict("records") if len(plain.columns) else [{}])
        return pd.DataFrame(records, columns=None if records else self.model.names)


mlflow.models.set_model(Served())
