"""Texts for a model with a head: of a class each, with any number of labels, or with a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from steadytrain.components.tasks.sequence_regression import rescale
from steadytrain.components.train.with_transformers.common import RUN, Kind, Rows


class Texts(Kind):
    """Rows are padded on the right. Each text has a target.

    problem: Transformers' name of the kind of target.
    """

    auto = AutoModelForSequenceClassification
    problem: str

    def labels(self) -> Sequence[str]:
        """Return the names of the model's outputs."""
        names: Sequence[str] = self.record["labels"]
        return names

    def settings(self) -> dict[str, Any]:
        labels = self.labels()
        return {
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: index for index, label in enumerate(labels)},
            "problem_type": self.problem,
            "pad_token_id": self.padding,
        }

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.padded([(row["input_ids"], row["input_ids"]) for row in rows])
        types = "token_type_ids"
        if any(any(row.get(types, ())) for row in rows):
            batch[types] = self.padded([(row[types], row[types]) for row in rows])["labels"]
            batch[types].clamp_(min=0)
        return batch | {"labels": self.targets([row["label"] for row in rows])}

    def targets(self, labels: Sequence[Any]) -> torch.Tensor:
        """Return the targets of a micro-batch, (texts,) or (texts, labels)."""
        raise NotImplementedError


def class_scores(given: Any) -> dict[str, float]:
    """Return accuracy and the mean F1 of the classes that are true or predicted."""
    predicted, true = np.argmax(given.predictions, axis=-1), given.label_ids
    scores = []
    for label in np.union1d(predicted, true):
        hits = np.sum((predicted == label) & (true == label))
        scores.append(2 * hits / (np.sum(predicted == label) + np.sum(true == label)))
    return {"accuracy": float(np.mean(predicted == true)), "macro_f1": float(np.mean(scores))}


class Classes(Texts):
    """A target is the index of a class."""

    problem = "single_label_classification"
    scores = staticmethod(class_scores)

    def targets(self, labels: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(labels)


class LabelSets(Texts):
    """A target is 0 or 1 for each label."""

    problem = "multi_label_classification"

    def targets(self, labels: Sequence[Any]) -> torch.Tensor:
        places = range(len(self.labels()))
        return torch.tensor([[float(place in of_row) for place in places] for of_row in labels])

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        # The labels of a text share its loss, and each counts as an item.
        items = labels.numel() if num_items_in_batch is None else num_items_in_batch
        logits, binary = outputs.logits.float(), functional.binary_cross_entropy_with_logits
        return binary(logits, labels, reduction="sum") / items


class Numbers(Texts):
    """A target is a standardized number.

    shift, unit: mean and deviation of the numbers.
    """

    problem = "regression"
    shift, unit = 0.0, 1.0

    def labels(self) -> Sequence[str]:
        return [RUN["label"]]

    def begin(self, rows: Rows, model: Any) -> None:
        """Standardize the numbers that the head learns.

        A head without a bias cannot represent a mean, so it learns them divided by their root mean
        square.
        """
        numbers = rows.table["label"].to_numpy()
        name, head = number_head(model)
        biased = head.bias is not None
        self.shift = float(numbers.mean()) if biased else 0.0
        self.unit = float(numbers.std() if biased else math.sqrt(np.square(numbers).mean()))
        if RUN["base"] is not None and f"{name}.weight" not in self.new:
            # It predicts the numbers themselves.
            rescale(head, -self.shift / self.unit, 1 / self.unit)

    def targets(self, labels: Sequence[Any]) -> torch.Tensor:
        numbers = np.asarray(labels, np.float64)
        return torch.from_numpy((numbers - self.shift) / self.unit).float()

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        items = len(labels) if num_items_in_batch is None else num_items_in_batch
        return (outputs.logits.float()[:, 0] - labels).square().sum() / items

    def end(self, model: Any) -> None:
        """Make the model return targets in the data's own units."""
        rescale(number_head(model)[1], self.shift, self.unit)


def number_head(model: Any) -> tuple[str, torch.nn.Linear]:
    """Return the name and the layer whose output is the number."""
    inner = f"{model.base_model_prefix}."
    heads = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear and layer.out_features == 1
        if not name.startswith(inner)
    ]
    if not heads:
        raise SystemExit("the model has no linear head for a number, which the script needs")
    return heads[-1]
