"""Neural networks by PyTorch, which is imported when one is built."""

from __future__ import annotations

from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import TABLES
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import TableLearner
from steadytrain.components.train.framework import LearnerTrainer


def learner(config: RunConfig, data: DataRecord) -> TableLearner:
    """Return the learner that `model.config.model_type` names."""
    from steadytrain.components.tabular.learners.torch_tables import MODELS

    name = config.model.config.get("model_type")
    if name not in MODELS:
        raise BadInput(
            f"model.config.model_type = {name!r}: model.framework pytorch_tables has no such model",
            remedy=f"use {' or '.join(sorted(MODELS))}",
        )
    return MODELS[name](config, data)


PYTORCH: Final = LearnerTrainer(
    learner, ("steadytrain.components.tabular.learners.torch_tables",), on_cpu=TABLES
)
