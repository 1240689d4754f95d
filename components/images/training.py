"""Train a model of images from Transformers, from scratch or from another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from steadytrain.components.images import networks
from steadytrain.components.images.encoder import PIXELS, scale_of
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import ImagesConfig
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.model_source import resolve_config, resolve_model
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Batch, LossSum, Row
from steadytrain.components.tasks.criterion import ClassTraining, Mixed
from steadytrain.components.tasks.models import build
from steadytrain.components.tasks.text import class_names, fit_head
from steadytrain.components.techniques.image_augmentation import ImageAugmentationConfig
from steadytrain.components.techniques.image_augmentation.changes import augmented
from steadytrain.components.techniques.mixup.mixing import CENTER, PARTNER, SHARE, mixed_images
from steadytrain.components.techniques.text_augmentation.changes import generator_of

_BATCH_NORM: Final = (
    "the model has batch normalization, so a smaller micro-batch, also where memory runs out, "
    "changes what it learns; models with layer normalization, such as convnext, learn the same"
)


class ImageTraining(ClassTraining):
    """Training of a model that reads images, alone or with other columns."""

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        normalized = any(isinstance(part, _BatchNorm) for part in model.modules())
        return [_BATCH_NORM] * normalized

    def cost(self, row: Row) -> int:
        del row
        return 1


class ImageClassification(ImageTraining):
    """Predict the class of each image."""

    task = "image_classification"

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        self.images = config.data.images
        self.remarks: list[str] = []

    @cached_property
    def scale(self) -> tuple[list[float], list[float]]:
        """The mean and deviation of each channel that pixels are scaled by, from 0 to 1."""
        return image_scale(self.config, self.data)

    def build_model(self) -> torch.nn.Module:
        from transformers import AutoModelForImageClassification

        given, labels = self.config.model, self.data.labels
        base, new = given.base, torch.get_default_device().type != "meta"
        arguments = networks.timms_arguments(resolve_config(base, self.config)) if base else {}
        if not base:
            with foreign("model.config cannot be built", "change the named field"):
                given = given.model_copy(
                    update={"config": networks.filled(given.config, self.images)}
                )
        model: Any = build(
            AutoModelForImageClassification,
            self.config.model_copy(update={"model": given}),
            self.data,
            None,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            problem_type="single_label_classification",
            **arguments,
        )
        networks.check_inputs(model, self.images)
        if base and new:
            folder = resolve_model(base, self.config)
            self.remarks = [*filter(None, [fit_head(model, class_names(folder), labels)])]
            if read := networks.of_folder(folder):
                self.remarks += networks.differences(read, self.images, "model.base")
        elif new and model.config.model_type == networks.TIMM:
            networks.init_like_timm(model)
        return model  # type: ignore[no-any-return]

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        return [*self.remarks, *super().ready(model)]

    def draw(self, row: Row, position: int, *, training: bool) -> Row:
        settings = self.config.training.image_augmentation
        if not (training and settings.on):
            return row
        pixels = pixels_of(row, self.images)
        return {**row, PIXELS: changed(pixels, settings, self.config.training.seed, position)}

    def collate(self, rows: Sequence[Row]) -> Batch:
        batch = {"targets": torch.tensor([int(row["label"]) for row in rows])}
        pixels = np.stack([pixels_of(row, self.images) for row in rows])
        if PARTNER in rows[0]:
            others = [row[PARTNER] for row in rows]
            partners = np.stack([pixels_of(row, self.images) for row in others])
            shares, centers = [row[SHARE] for row in rows], [row.get(CENTER) for row in rows]
            pixels, of_pixels, of_targets = mixed_images(pixels, partners, shares, centers)
            batch |= {
                "partners": channels_first(partners),
                "partner_targets": torch.tensor([int(row["label"]) for row in others]),
                "pixel_shares": torch.from_numpy(of_pixels),
                "shares": torch.from_numpy(of_targets),
            }
        return {PIXELS: channels_first(pixels), **batch}

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        mixed = None
        if "partners" in batch:
            mixed = Mixed(batch["partner_targets"], batch["shares"])
        return LossSum(self.criterion(self.logits(model, batch), batch["targets"], mixed))

    def logits(self, model: Any, batch: Batch) -> torch.Tensor:
        values = scaled(batch[PIXELS], self.scale)
        if "partners" in batch:
            share = batch["pixel_shares"].view(-1, 1, 1, 1)
            values = share * values + (1 - share) * scaled(batch["partners"], self.scale)
        result: torch.Tensor = model(pixel_values=values).logits.float()
        return result


def pixels_of(row: Mapping[str, Any], images: ImagesConfig) -> Any:
    """Return the image of a row: (height, width, channels), uint8."""
    shape = (images.size, images.size, images.channels)
    return np.frombuffer(row[PIXELS], np.uint8).reshape(shape)


def changed(pixels: Any, settings: ImageAugmentationConfig, seed: int, position: int) -> Any:
    """Return the changed pixels of the image at a position of the order of all steps."""
    return augmented(pixels, settings, generator_of(seed, f"image augmentation {position}"))


def channels_first(pixels: Any) -> torch.Tensor:
    """Return images of the shape (images, height, width, channels) with their channels first."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


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
    folder = resolve_model(base, config) if base and images.normalization != "data" else None
    return networks.given_scale(images, folder, config.model.config) or scale_of(data)
