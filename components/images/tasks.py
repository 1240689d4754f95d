"""The task of images. Nothing here imports torch."""

from __future__ import annotations

from typing import Final

from steadytrain.components.images.encoder import ImageEncoder
from steadytrain.components.tasks.base import Task, field_names, late
from steadytrain.components.tasks.built_in import class_metrics, tested_class_metrics

_PARTS: Final = "steadytrain.components.images"

_READS: Final = field_names(
    {
        "model": "framework base revision trust_remote_code config dropout export_dtype",
        "data": "task source validation_source test_source splits format csv exclude columns "
        "labels images max_record_bytes max_bad_share validation_share test_share split_salt",
        "data.columns": "image label group slice",
    }
)

IMAGE_CLASSIFICATION: Final = Task(
    encoder=ImageEncoder,
    training=late(f"{_PARTS}.training:ImageClassification", metrics=class_metrics),
    scorer=late(f"{_PARTS}.scoring:ImageScorer", metrics=tested_class_metrics),
    packager=late(f"{_PARTS}.scoring:ImagePackager"),
    objectives=frozenset({"focal_loss", "class_weights", "image_augmentation", "mixup"}),
    reads=_READS,
)
