"""Classify a text with one label, by an encoder or decoder with a classification head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch.nn import functional

from steadytrain.components.shared.artifact import Artifact, timed
from steadytrain.components.shared.model_source import resolve_config
from steadytrain.components.tasks.base import FEW, Batch, LossSum, Row
from steadytrain.components.tasks.criterion import ClassTraining, Mixed
from steadytrain.components.tasks.loaded_weights import dtype_of_files
from steadytrain.components.tasks.packaging import ADAPTERS, TransformersPackager
from steadytrain.components.tasks.scoring.classification import ClassificationScorer
from steadytrain.components.tasks.text import (
    R_DROP,
    TextHead,
    check_drops,
    class_names,
    fit_head,
    head_logits,
    head_output,
    order_rows,
    padded_inputs,
)
from steadytrain.components.techniques.contrastive_texts.loss import (
    pooled,
    supervised_contrastive_loss,
)
from steadytrain.components.techniques.distillation.loss import (
    attach_comparison,
    collate_answers,
    comparing,
    comparing_part,
    taught_loss,
)
from steadytrain.components.techniques.distillation.teacher import (
    FIELD,
    AnsweringTeacher,
    LogitsOf,
    Teacher,
    check_labels,
    stored_teaching,
)
from steadytrain.components.techniques.mixup.mixing import PARTNER, SHARE, mixed_batch, mixing
from steadytrain.components.techniques.r_drop.passes import in_pairs, twice


class SequenceClassification(TextHead, ClassTraining):
    """Predict the label of each row: the index of the class."""

    task = "sequence_classification"
    problem_type = "single_label_classification"
    teacher: Teacher | None = None
    head_remark = ""
    embedding: torch.nn.Module | None = None

    def build_model(self) -> torch.nn.Module:
        labels = self.data.labels
        model = self.build_headed(labels, self.problem_type)
        base = self.config.model.base
        if base and torch.get_default_device().type != "meta":
            names = class_names(resolve_config(base, self.config))
            self.head_remark = fit_head(model, names, labels)
        return model

    def extend(self, model: torch.nn.Module) -> None:
        if self.config.training.distillation.hidden.on:
            attach_comparison(model, self.config)

    def ready(self, model: Any) -> Sequence[str]:
        settings = self.config.training.distillation
        if settings.on and not settings.stored:
            reference = self.load_reference(str(settings.teacher), FIELD)
            self.teacher = Teacher(reference, settings, comparing_part(model))
        if self.criterion.r_drop:
            check_drops(model, R_DROP, self.criterion.r_drop)
        if self.config.training.mixup.on:
            self.embedding = model.get_input_embeddings()
        return [*super().ready(model), *filter(None, [self.head_remark])]

    def open_teacher(self, student: torch.nn.Module) -> AnsweringTeacher:
        del student
        settings = self.config.training.distillation
        teacher = Teacher(self.load_reference(str(settings.teacher), FIELD), settings)
        collate = partial(collate_padded, pad_token_id=self.pad_token_id)
        return AnsweringTeacher(teacher, _class_answers, collate, len(self.data.labels))

    def load_reference(self, address: str, field: str) -> torch.nn.Module:
        model = super().load_reference(address, field)
        order_rows(model, self.data.labels, field)
        check_labels(model, self.data.labels, address, field)
        return model

    def row_losses(
        self, model: torch.nn.Module, batch: Batch, counts: Sequence[int]
    ) -> torch.Tensor:
        del counts
        logits = head_logits(model, batch)
        return functional.cross_entropy(logits, batch["targets"], reduction="none")

    def collate(self, rows: Sequence[Row]) -> Batch:
        batch = collate_padded(rows, self.pad_token_id) | collate_answers(rows)
        if PARTNER not in rows[0]:
            return batch
        partners = collate_padded([row[PARTNER] for row in rows], self.pad_token_id)
        return mixed_batch(batch, partners, [row[SHARE] for row in rows], self.pad_token_id)

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        smoothing = self.config.training.label_smoothing_factor
        contrast = self.config.training.batch_contrastive
        if self.criterion.r_drop:
            batch = twice(batch)
        targets = batch["targets"]
        # The teacher comes first: the student's activations do not exist yet.
        teaching = stored_teaching(batch, self.config.training.distillation)
        if self.teacher is not None:
            teaching = self.teacher.teach(_class_answers, batch)
        comparison = teaching.comparison if teaching else None
        with comparing(comparison, _token_shares(batch)), mixing(self.embedding, batch):
            given = head_output(model, batch, states=contrast.on or comparison is not None)
        logits = given.logits.float()
        if teaching is None:
            order = in_pairs if self.criterion.r_drop else _unchanged
            total = self.criterion(order(logits), order(targets), _mixed(batch, order))
        else:
            total = taught_loss(logits, targets, teaching, smoothing)
        if contrast.on:
            rows = pooled(given.hidden_states[-1], batch["attention_mask"])
            compared = supervised_contrastive_loss(rows, targets, contrast.temperature)
            total = total + contrast.weight * compared
        if comparison is not None:
            total = total + comparison.loss(given)
        return LossSum(total)

    def logits(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return head_logits(model, batch)


class ClassifierPackager(TransformersPackager):
    """Packages a classifier of texts."""

    training = SequenceClassification
    pipeline = "text-classification"

    def measured(self, folder: Path, records: pa.Table, *, most: int = FEW) -> Artifact:
        def opened() -> Callable[[pa.Table], object]:
            components = self.load_exported(folder)
            scorer = ClassificationScorer(self.config, self.data)
            return lambda record: scorer.score(components, record)

        each = [records.slice(row, 1) for row in range(min(most, records.num_rows))]
        found = timed(folder, opened, each, late_libraries=True)
        if not (folder / ADAPTERS).is_file():
            return found
        # They are registered with the model that they are merged into.
        model = self.load_exported(folder)["model"]
        weights = sum(one.numel() for one in model.parameters())
        size = found.size_mb + weights * self._dtype(dtype_of_files(model)).itemsize / 1e6
        return found.model_copy(update={"size_mb": round(size, 4)})


def collate_padded(rows: Sequence[Row], pad_token_id: int) -> Batch:
    """Return a micro-batch of rows, padded to the longest."""
    labels = torch.tensor([int(row["label"]) for row in rows])
    return padded_inputs(rows, pad_token_id) | {"targets": labels}


def class_loss(model: torch.nn.Module, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
    """Return the summed cross-entropy of a micro-batch, in nats, with smoothed labels."""
    return functional.cross_entropy(
        head_logits(model, batch), batch["targets"], reduction="sum", label_smoothing=smoothing
    )


def _class_answers(
    model: torch.nn.Module, batch: Batch, *, states: bool = False
) -> tuple[Any, LogitsOf]:
    """Return what `head_output` returns, and what gives the logits of some rows."""
    output = head_output(model, batch, states=states)
    return output, lambda rows: output.logits[rows]


def _token_shares(batch: Batch) -> torch.Tensor:
    """Return the share of each token in its row, (rows, length), float32; 0 for padding."""
    mask: torch.Tensor = batch["attention_mask"].float()
    return mask / mask.sum(1, keepdim=True)


def _mixed(batch: Batch, order: Callable[[torch.Tensor], torch.Tensor]) -> Mixed | None:
    """Return the second targets of mixtures; None if the micro-batch has none."""
    if "shares" not in batch:
        return None
    return Mixed(order(batch["partner_targets"]), order(batch["shares"]))


def _unchanged(rows: torch.Tensor) -> torch.Tensor:
    return rows
