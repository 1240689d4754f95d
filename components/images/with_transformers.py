"""Images of one class each, in a train_with_transformers.py.

components/train/transformers_script.py makes one file of it. Nothing else imports this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageClassification
from transformers.utils import cached_file

from steadytrain.components.images.encoder import PIXELS
from steadytrain.components.images.networks import (
    PROCESSOR,
    TIMM,
    filled,
    given_scale,
    init_like_timm,
    timms_arguments,
)
from steadytrain.components.images.training import changed, channels_first, pixels_of, scaled
from steadytrain.components.shared.config.data_sections import ImagesConfig
from steadytrain.components.tasks.encoding.base import COLUMNS
from steadytrain.components.techniques.image_augmentation import ImageAugmentationConfig
from steadytrain.components.train.with_transformers.common import (
    ARGUMENTS,
    RUN,
    Kind,
    Rows,
    located,
)
from steadytrain.components.train.with_transformers.texts import class_scores


class Images(Kind):
    """Pixels are changed at random in training, as in the run."""

    auto = AutoModelForImageClassification
    grouped = False
    scores = staticmethod(class_scores)
    images, changes = ImagesConfig(), ImageAugmentationConfig()

    @cached_property
    def folder(self) -> Path | None:
        """The folder of the base model's configuration; None for a model from scratch."""
        if RUN["base"] is None:
            return None
        where = {} if RUN["revision"] is None else {"revision": RUN["revision"]}
        base = located(RUN["base"])
        cached_file(base, PROCESSOR, _raise_exceptions_for_missing_entries=False, **where)
        return Path(cached_file(base, "config.json", **where)).parent

    @cached_property
    def scale(self) -> tuple[list[float], list[float]]:
        """The mean and deviation of each channel."""
        given = given_scale(self.images, self.folder, RUN["config"])
        if given is not None:
            return given
        columns = json.loads(Path(self.record["folder"], COLUMNS).read_text())
        return columns["mean"], columns["deviation"]

    def config(self) -> dict[str, Any]:
        return filled(RUN["config"], self.images)

    def settings(self) -> dict[str, Any]:
        labels = self.record["labels"]
        return {
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: index for index, label in enumerate(labels)},
            "problem_type": "single_label_classification",
            **(timms_arguments(self.folder) if self.folder else {}),
        }

    def begin(self, rows: Rows, model: Any) -> None:
        del rows
        if self.folder is None and model.config.model_type == TIMM:
            init_like_timm(model)

    def draw(self, row: dict[str, Any], *seed: int) -> dict[str, Any]:
        pixels = pixels_of(row, self.images)
        if seed[0] and self.changes.on:
            pixels = changed(pixels, self.changes, ARGUMENTS["seed"], seed[-1])
        return {**row, PIXELS: pixels}

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        pixels = channels_first(np.stack([row[PIXELS] for row in rows]))
        labels = torch.tensor([row["label"] for row in rows])
        return {"pixel_values": scaled(pixels, self.scale), "labels": labels}
