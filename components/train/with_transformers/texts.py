"""Texts, for a model with a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from steadytrain.components.train.with_transformers.common import Kind


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
        """Return what the texts of a micro-batch have, (texts,) or (texts, labels)."""
        raise NotImplementedError
