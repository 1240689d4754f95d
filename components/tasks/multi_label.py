"""Give a text any number of labels, by an encoder or decoder with an output for each label."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from steadytrain.components.shared.arrow_files import open_batches
from steadytrain.components.shared.config.data_sections import MULTI_LABEL
from steadytrain.components.tasks.base import Batch, Components, LossSum, Row
from steadytrain.components.tasks.fitting import batched
from steadytrain.components.tasks.packaging import ADAPTERS, MODEL_CONFIG
from steadytrain.components.tasks.scoring.multi_label import (
    FIELD,
    fixed_labels,
    label_losses,
    without_thresholds,
)
from steadytrain.components.tasks.scoring.thresholds import HALF, best_thresholds
from steadytrain.components.tasks.sequence_classification import (
    ClassifierPackager,
    SequenceClassification,
)
from steadytrain.components.tasks.text import head_logits, padded_inputs
from steadytrain.components.techniques.modules import eval_mode, to_device


class MultiLabelClassification(SequenceClassification):
    """Predict the labels of each row: the indices of those that it has."""

    task = MULTI_LABEL
    problem_type = "multi_label_classification"

    def build_model(self) -> torch.nn.Module:
        return without_thresholds(super().build_model())

    def ready(self, model: Any) -> Sequence[str]:
        fixed = fixed_labels(self.config.training, self.data)
        return [*super().ready(model), *filter(None, [fixed])]

    def row_losses(
        self, model: torch.nn.Module, batch: Batch, counts: Sequence[int]
    ) -> torch.Tensor:
        del counts
        return label_losses(head_logits(model, batch), batch["targets"])

    def collate(self, rows: Sequence[Row]) -> Batch:
        targets = torch.zeros((len(rows), len(self.data.labels)))
        for target, row in zip(targets, rows, strict=True):
            target[torch.from_numpy(np.asarray(row["label"], dtype=np.int64))] = 1
        return padded_inputs(rows, self.pad_token_id) | {"targets": targets}

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        return LossSum(label_losses(head_logits(model, batch), batch["targets"]).sum())

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        logits, targets = head_logits(model, batch), batch["targets"] > 0
        predicted = logits >= 0
        sums = {
            "loss": label_losses(logits, batch["targets"]).sum().item(),
            "weight": float(len(targets)),
            "exact": (predicted == targets).all(1).sum().item(),
        }
        # Each label's hits, and how often it is true or predicted, for F1.
        hits, seen = (targets & predicted).sum(0), targets.sum(0) + predicted.sum(0)
        for name, counts in (("hits", hits), ("seen", seen)):
            sums |= {f"{name}_{index}": count for index, count in enumerate(counts.tolist())}
        return sums

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        rows = max(sums["weight"], 1)
        places = range(len(self.data.labels))
        hits, seen = ([sums.get(f"{name}_{n}", 0) for n in places] for name in ("hits", "seen"))
        # As on the test side, a label that is neither true nor predicted does not count.
        scores = [2 * hit / count for hit, count in zip(hits, seen, strict=True) if count]
        return {
            "loss": sums["loss"] / rows,
            "micro_f1": 2 * sum(hits) / max(sum(seen), 1),
            "macro_f1": sum(scores) / max(len(scores), 1),
            "subset_accuracy": sums["exact"] / rows,
        }


class MultiLabelPackager(ClassifierPackager):
    """Packages a classifier with an output for each label, and the threshold of each."""

    training = MultiLabelClassification

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        super().export(model, folder)
        if self.config.training.label_thresholds != "half":
            path = _config_file(folder)
            content = json.loads(path.read_text(encoding="utf-8"))
            content[FIELD] = self._best(model)
            path.write_text(f"{json.dumps(content, indent=2, sort_keys=True)}\n", encoding="utf-8")

    def load_exported(self, folder: Path) -> Components:
        components = super().load_exported(folder)
        # Adapters come without the configuration of the model that they are merged into.
        content = json.loads(_config_file(folder).read_text(encoding="utf-8"))
        setattr(components["model"].config, FIELD, content.get(FIELD, {}))
        return components

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        content = json.loads(_config_file(folder).read_text(encoding="utf-8"))
        thresholds = {label: content.get(FIELD, {}).get(label, HALF) for label in self.data.labels}
        noted = {**metadata, "thresholds": json.dumps(thresholds)}
        return super().log_model(folder, name=name, records=records, metadata=noted)

    def _best(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the best threshold of each label on the validation side."""
        training, device = self.training(self.config, self.data), next(model.parameters()).device
        truth, probabilities = list[Any](), list[Any]()

        def answers(rows: Sequence[Row]) -> Any:
            batch = to_device(training.collate(rows), device)
            return head_logits(model, batch).double().sigmoid().cpu().numpy()

        with eval_mode(model):
            for shard in self.data.sides["validation"].shards:
                for stored in open_batches(self.data.path(shard)):
                    rows = stored.checked().to_pylist()
                    size = self.config.evaluation.batch_size
                    probabilities += batched(answers, rows, size, training.cost)
                    truth.append(training.collate(rows)["targets"].numpy() > 0)
        shared = self.config.training.label_thresholds == "shared"
        thresholds = best_thresholds(np.concatenate(truth), np.stack(probabilities), shared=shared)
        return dict(zip(self.data.labels, thresholds, strict=True))


def _config_file(folder: Path) -> Path:
    """Return the config.json of an exported model, or of the model that adapters are for."""
    adapted = (folder / ADAPTERS).is_file()
    return folder / MODEL_CONFIG / "config.json" if adapted else folder / "config.json"
