"""The task of tables with texts and images. Nothing here imports torch."""

from __future__ import annotations

from typing import Final

from steadytrain.components.multimodal.encoder import MultimodalEncoder
from steadytrain.components.tasks.base import Task, field_names, late
from steadytrain.components.tasks.built_in import class_metrics, tested_class_metrics

_PARTS: Final = "steadytrain.components.multimodal"

_READS: Final = field_names(
    {
        "model": "framework base revision config tokenizer vocab_size dropout fusion",
        "data": "task source validation_source test_source splits format csv exclude columns "
        "target features categories allow_leaks labels images sequence_length "
        "near_duplicate_threshold max_record_bytes max_bad_share validation_share test_share "
        "split_salt",
        "data.columns": "text image group slice",
    }
)

MULTIMODAL_CLASSIFICATION: Final = Task(
    encoder=MultimodalEncoder,
    training=late(f"{_PARTS}.training:MultimodalClassification", metrics=class_metrics),
    scorer=late(f"{_PARTS}.scoring:MultimodalScorer", metrics=tested_class_metrics),
    packager=late(f"{_PARTS}.scoring:MultimodalPackager"),
    objectives=frozenset({"focal_loss", "class_weights"}),
    reads=_READS,
)
