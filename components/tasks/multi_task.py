"""Classify the texts of several data sets with one encoder (Caruana 1997, "Multitask Learning").

Each part has a linear head of its own: the rows of one classification layer that belong to its
classes. A text is compared with the classes of its own part alone, as if there were no others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from steadytrain.components.shared.class_names import have_parts, in_part, part_indices
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign, system_errors
from steadytrain.components.shared.storage.local import follow_umask, room_for
from steadytrain.components.tasks.base import Batch, LossSum
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.loaded_weights import check_complete
from steadytrain.components.tasks.packaging import ADAPTERS, never_wrapped
from steadytrain.components.tasks.sequence_classification import (
    ClassifierPackager,
    SequenceClassification,
)
from steadytrain.components.tasks.text import class_head, head_logits, head_output
from steadytrain.components.techniques.multi_task.weights import (
    attach_uncertainty,
    uncertain_loss,
)
from steadytrain.components.techniques.r_drop.passes import diverging, twice


class MultiTaskClassification(SequenceClassification):
    """Predict the label of each row among the classes of its part."""

    task = "multi_task"

    @cached_property
    def parts(self) -> list[str]:
        """The names of the parts, sorted."""
        return part_indices(self.data.labels)[0]

    @cached_property
    def owners(self) -> torch.Tensor:
        """The part of each class, (classes), int64."""
        return torch.tensor(self.class_parts)

    @property
    def class_parts(self) -> Sequence[int]:
        return part_indices(self.data.labels)[1]

    @cached_property
    def weights(self) -> torch.Tensor:
        """The factor on the loss of each part's rows, (parts), float32."""
        given = self.config.training.multi_task.loss_weights
        return torch.tensor([given.get(part, 1.0) for part in self.parts])

    @property
    def learns_weights(self) -> bool:
        return self.config.training.multi_task.learns_weights

    def extend(self, model: torch.nn.Module) -> None:
        if self.learns_weights:
            attach_uncertainty(model, len(self.parts))

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        if self.criterion.r_drop:
            batch = twice(batch)
        targets = batch["targets"]
        owners = self.owners.to(targets.device)
        given = head_output(model, batch)
        logits = mask_others(given.logits.float(), targets, owners)
        losses = smoothed_losses(logits, targets, self.criterion.smoothing)
        losses = self.criterion.scaled(losses, logits, targets)
        if self.criterion.r_drop:
            logs, both = part_log_probabilities(logits).chunk(2), losses.chunk(2)
            divergence = diverging(*logs).sum(1)
            losses = self.criterion.of_both_passes(both[0] + both[1], divergence)
            targets = batch["targets"].chunk(2)[0]
        if self.learns_weights:
            return LossSum(uncertain_loss(losses, owners[targets], given.loss))
        weights = self.weights.to(targets.device)
        return LossSum((losses * weights[owners[targets]]).sum())

    def row_losses(
        self, model: torch.nn.Module, batch: Batch, counts: Sequence[int]
    ) -> torch.Tensor:
        del counts
        targets = batch["targets"]
        owners = self.owners.to(targets.device)
        return smoothed_losses(mask_others(head_logits(model, batch), targets, owners), targets)

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        targets = batch["targets"]
        owners = self.owners.to(targets.device)
        given = head_output(model, batch)
        logits = mask_others(given.logits.float(), targets, owners)
        losses = smoothed_losses(logits, targets)
        correct = logits.argmax(-1) == targets
        sums = {"loss": losses.sum().item(), "weight": float(len(targets))}
        for index, part in enumerate(self.parts):
            mine = owners[targets] == index
            sums |= {
                f"{part}_loss": losses[mine].sum().item(),
                f"{part}_weight": mine.sum().item(),
                f"{part}_correct": correct[mine].sum().item(),
            }
        if self.learns_weights:
            for part, weight in zip(self.parts, (-given.loss).exp().tolist(), strict=True):
                sums[f"{part}_learned"] = weight * len(targets)
        return sums

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the loss and the accuracy of each part, and the mean of all parts, as in GLUE.

        With uncertainty, also the weight of each part's loss.
        A part without rows on the validation side is left out of the mean.
        """
        metrics = {
            f"{part}_{metric}": sums.get(f"{part}_{summed}", 0) / max(rows, 1)
            for part in self.parts
            for rows in [sums.get(f"{part}_weight", 0)]
            for metric, summed in (("loss", "loss"), ("accuracy", "correct"))
        }
        seen = [part for part in self.parts if sums.get(f"{part}_weight", 0)]
        means = {
            metric: sum(metrics[f"{part}_{metric}"] for part in seen) / max(len(seen), 1)
            for metric in ("loss", "accuracy")
        }
        learned = {
            f"{part}_loss_weight": sums[f"{part}_learned"] / max(sums["weight"], 1)
            for part in self.parts
            if self.learns_weights
        }
        return means | metrics | learned


class MultiTaskPackager(ClassifierPackager):
    """Packages a classifier with the heads of all parts."""

    training = MultiTaskClassification


def mask_others(logits: torch.Tensor, targets: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """Return logits that are minus infinity outside the part of each row.

    Args:
        logits: (rows, classes).
        targets: (rows), the class of each row.
        owners: (classes), the part of each class.
    """
    same_task = owners == owners[targets][:, None]
    return logits.masked_fill(~same_task, -torch.inf)


def smoothed_losses(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the cross-entropy of each row in nats, (rows).

    Args:
        logits: as `mask_others` returns them.
        smoothing: share of each target that is spread over all classes of its part.
    """
    logs = part_log_probabilities(logits)
    losses = -logs.gather(1, targets[:, None])[:, 0]
    if not smoothing:
        return losses
    # torch's own smoothing would also spread it over the classes that are impossible here.
    spread = -logs.sum(1) / logits.isfinite().sum(1)
    return (1 - smoothing) * losses + smoothing * spread


def part_log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of the probabilities, (rows, classes); 0 outside the part of each row.

    Args:
        logits: as `mask_others` returns them.
    """
    return logits.log_softmax(-1).masked_fill(~logits.isfinite(), 0)


def extract_part(source: Path, part: str, target: Path) -> list[str]:
    """Write the classifier of a part, with the encoder and the tokenizer, as a plain folder.

    Args:
        source: an exported model of several data sets.
        target: the folder, which must not exist or be empty. A link is followed.

    Returns:
        The classes of the part, without its name.

    Raises:
        BadInput: the model is damaged or has no such part, or the target cannot be written.
    """
    from transformers import AutoModelForSequenceClassification as Auto

    if (source / ADAPTERS).is_file():
        raise BadInput(
            f"{source} has adapters without their base model",
            remedy="register the run, which merges them, and extract the part from "
            "models:/NAME@ALIAS",
        )
    if _followed(target).is_relative_to(_followed(source)):
        raise BadInput(
            f"{target} is in the model's own folder, {source}",
            remedy="give a folder outside of it",
        )
    with foreign(f"{source} cannot be loaded", "give the exported model of a multi_task run"):
        model: Any
        model, report = Auto.from_pretrained(
            source, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        tokenizer = load_tokenizer(source)
    check_complete(model, report, source, new_head=False, field="the model")
    labels = [model.config.id2label[index] for index in range(model.config.num_labels)]
    rows = [index for index, label in enumerate(labels) if in_part(label, part)]
    if not rows:
        raise BadInput(
            f"{source} has no part {part!r}",
            remedy=f"one of {', '.join(part_indices(labels)[0])}"
            if have_parts(labels)
            else "give a model of data.task multi_task; the classes of this one have no parts",
        )
    labels_of_part = [labels[index].partition("/")[2] for index in rows]
    _keep(model, rows)
    model.config.id2label = dict(enumerate(labels_of_part))
    model.config.label2id = {label: index for index, label in enumerate(labels_of_part)}
    _write(model, tokenizer, _followed(target))
    return labels_of_part


def _followed(path: Path) -> Path:
    """Return where links lead. `Path.resolve` fails if a link leads to itself."""
    return Path(os.path.realpath(path))


def _keep(model: Any, rows: list[int]) -> None:
    """Keep only some rows of the head."""
    name, head = class_head(model)
    fewer = torch.nn.Linear(
        head.in_features, len(rows), bias=head.bias is not None, dtype=head.weight.dtype
    )
    with torch.no_grad():
        for fewer_rows, all_rows in zip(fewer.parameters(), head.parameters(), strict=True):
            fewer_rows.copy_(all_rows[rows])
    model.set_submodule(name, fewer)


def _write(model: Any, tokenizer: Any, target: Path) -> None:
    unfinished = target.parent / f".partial-{target.name}"
    try:
        if target.exists() and any(target.iterdir()):
            raise BadInput(f"{target} is not empty", remedy="give a folder that does not exist")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with never_wrapped(), system_errors():
            model.save_pretrained(unfinished, safe_serialization=True)
            tokenizer.save_pretrained(unfinished)
        follow_umask(unfinished)
        unfinished.replace(target)
    except OSError as error:
        raise BadInput(
            f"{target} cannot be written: {error.strerror or error}",
            remedy=f"give another folder, or {room_for(error)}",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
