"""Train a model of images from Transformers, from scratch or from another model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from steadytrain.components.images.encoder import PIXELS, scale_of
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.model_source import resolve_config, resolve_model
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Batch, LossSum, Row
from steadytrain.components.tasks.criterion import Criterion, class_metrics, class_sums
from steadytrain.components.tasks.models import build
from steadytrain.components.tasks.scoring.table import class_counts
from steadytrain.components.tasks.text import class_names, fit_head
from steadytrain.components.techniques.image_augmentation.changes import augmented
from steadytrain.components.techniques.rare_classes.weights import class_weights
from steadytrain.components.techniques.text_augmentation.changes import generator_of

PROCESSOR: Final = "preprocessor_config.json"
"""Transformers' name of the file with a model's mean and deviation."""
_BATCH_NORM: Final = (
    "the model has batch normalization, so a smaller micro-batch, also where memory runs out, "
    "changes what it learns; models with layer normalization, such as convnext, learn the same"
)


class ImageClassification:
    """Predict the class of each image."""

    task = "image_classification"
    metric = "loss"
    greater_is_better = False

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data
        self.images = config.data.images
        self.head_remark = ""

    @cached_property
    def criterion(self) -> Criterion:
        training, counts = self.config.training, partial(class_counts, self.data)
        weights = class_weights(training.class_weights, self.data.labels, counts)
        return Criterion.of(training, weights)

    @cached_property
    def scale(self) -> tuple[list[float], list[float]]:
        """The mean and deviation of each channel that pixels are scaled by, from 0 to 1."""
        return image_scale(self.config, self.data)

    def build_model(self) -> torch.nn.Module:
        from transformers import AutoModelForImageClassification

        base, labels = self.config.model.base, self.data.labels
        model: Any = build(
            AutoModelForImageClassification,
            self.config,
            self.data,
            None,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            problem_type="single_label_classification",
            **({} if base else self._input_fields()),
        )
        self._check_inputs(model)
        if base and torch.get_default_device().type != "meta":
            self.head_remark = fit_head(
                model, class_names(resolve_config(base, self.config)), labels
            )
        return model  # type: ignore[no-any-return]

    def _input_fields(self) -> dict[str, int]:
        """Return the fields of a new model that the images determine."""
        from transformers import AutoConfig

        known = AutoConfig.for_model(self.config.model.config["model_type"]).to_dict()
        fields = {"image_size": self.images.size, "num_channels": self.images.channels}
        return {name: value for name, value in fields.items() if name in known}

    def _check_inputs(self, model: Any) -> None:
        wanted = {"size": ("image_size", self.images.size)}
        wanted["color"] = ("num_channels", self.images.channels)
        for field, (name, value) in wanted.items():
            found = getattr(model.config, name, None)
            if isinstance(found, int) and found != value:
                raise BadInput(
                    f"data.images.{field} = {getattr(self.images, field)!r}: the model has "
                    f"{name} {found}, and the images {value}",
                    remedy=f"set data.images.size to {found}"
                    if field == "size"
                    else "set data.images.color to rgb for three channels, and to gray for one",
                )

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        normalized = any(isinstance(part, _BatchNorm) for part in model.modules())
        return [*filter(None, [self.head_remark, _BATCH_NORM * normalized])]

    def cost(self, row: Row) -> int:
        del row
        return 1

    def draw(self, row: Row, place: int, *, training: bool) -> Row:
        settings = self.config.training.image_augmentation
        if not (training and settings.on):
            return row
        random = generator_of(self.config.training.seed, f"image augmentation {place}")
        return {**row, PIXELS: augmented(self._pixels(row), settings, random)}

    def _pixels(self, row: Row) -> Any:
        shape = (self.images.size, self.images.size, self.images.channels)
        return np.frombuffer(row[PIXELS], np.uint8).reshape(shape)

    def collate(self, rows: Sequence[Row]) -> Batch:
        pixels = torch.from_numpy(np.stack([self._pixels(row) for row in rows]))
        return {
            PIXELS: pixels.permute(0, 3, 1, 2).contiguous(),
            "targets": torch.tensor([int(row["label"]) for row in rows]),
        }

    def weight(self, batch: Batch) -> int:
        return len(batch["targets"])

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        return LossSum(self.criterion(self._logits(model, batch), batch["targets"]))

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        return class_sums(self._logits(model, batch), batch["targets"])

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return class_metrics(sums)

    def _logits(self, model: Any, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(pixel_values=scaled(batch[PIXELS], self.scale)).logits.float()
        return found


def scaled(pixels: torch.Tensor, scale: tuple[Sequence[float], Sequence[float]]) -> torch.Tensor:
    """Return the input of a model: (images, channels, height, width), float32.

    Args:
        pixels: the same, uint8.
        scale: mean and deviation of each channel.
    """
    mean, deviation = (
        torch.tensor(values, device=pixels.device).view(1, -1, 1, 1) for values in scale
    )
    return (pixels.float() / 255 - mean) / deviation


def image_scale(config: RunConfig, data: DataRecord) -> tuple[list[float], list[float]]:
    """Return the mean and deviation of each channel.

    Raises:
        BadInput: those of the model are asked for, and it has none for these channels.
    """
    images, base = config.data.images, config.model.base
    asked = images.normalization == "model"
    path = resolve_model(base, config) / PROCESSOR if base else None
    if images.normalization == "data" or path is None or not path.is_file():
        if asked:
            raise BadInput(
                f"data.images.normalization = 'model': model.base has no {PROCESSOR}"
                if base
                else "data.images.normalization = 'model': a model from scratch has none",
                remedy="set it to data, or leave it out",
            )
        return scale_of(data)
    content = json.loads(path.read_text(encoding="utf-8"))
    found = tuple(content.get(name) for name in ("image_mean", "image_std"))
    fits = [
        isinstance(each, list)
        and len(each) == images.channels
        and all(isinstance(value, int | float) for value in each)
        for each in found
    ]
    if not all(fits):
        raise BadInput(
            f"model.base: image_mean and image_std in {path} are {found[0]!r} and {found[1]!r}, "
            f"not {images.channels} numbers each",
            remedy="set data.images.normalization to data, or data.images.color to what the model "
            "reads",
        )
    mean, deviation = found
    return list(map(float, mean or ())), list(map(float, deviation or ()))
