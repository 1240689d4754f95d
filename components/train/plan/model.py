"""The model that a configuration names, without its weights."""

from __future__ import annotations

from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.train.plan.architectures import architecture_of
from steadytrain.components.train.plan.shape import Shape, shape_of

ASSUMED_LABELS: Final = 2
"""Classes of a classification whose labels are not configured; they weigh next to nothing."""


def model_shape(config: RunConfig) -> Shape:
    """Its sizes.

    Raises:
        BadInput: its architecture is not known, or not known to the formulas.
    """
    return shape_of(architecture_of(config.model), labels=label_count(config))


def label_count(config: RunConfig) -> int:
    """Classes of a classification head; 0: a language model's head."""
    if config.data.task != "sequence_classification":
        return 0
    return len(config.data.labels or ()) or ASSUMED_LABELS


def model_name(config: RunConfig) -> str:
    """As people know it."""
    if config.model.base is None:
        return f"{config.model.config['model_type']} from scratch"
    return config.model.base.removeprefix("hub:")
