"""The model as MLflow serves it: texts in, labels out. MLflow stores this file with the model."""

from pathlib import Path

import mlflow

from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain_example.token_counts import predict, read


class Served(mlflow.pyfunc.PythonModel):
    """Its settings: "labels", and "length", the tokens of a text that count."""

    def load_context(self, context):
        folder = Path(context.artifacts["model"])
        self.settings = context.model_config
        self.model, self.tokenizer = read(folder), load_tokenizer(folder)

    def predict(self, context, model_input: list[str], params=None) -> list[str]:
        labels, length = self.settings["labels"], self.settings["length"]
        chances = predict(self.model, self.tokenizer, model_input, length)
        return [labels[index] for index in chances.argmax(axis=1)]


mlflow.models.set_model(Served())
