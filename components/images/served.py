"""A model of images as MLflow serves it. MLflow stores this file with the model.

It loads the model with the code that was exported with it, so that it needs no steadytrain.
"""

import importlib.util
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd


class Served(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Takes a frame with the column `image`, and returns one with the predictions.

    An image is the content of a file, its path, or an array of pixels.
    """

    def load_context(self, context: Any) -> None:
        folder = Path(context.artifacts["model"])
        code: Any = importlib.util.spec_from_file_location("predictor", folder / "predictor.py")
        module = importlib.util.module_from_spec(code)
        code.loader.exec_module(module)
        self.model = module.Predictor(folder)

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        del context, params
        records = self.model.rows(list(model_input["image"]))
        return pd.DataFrame(records, columns=None if records else self.model.names)


mlflow.models.set_model(Served())
