"""The configured model, without its weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.memory.architectures import architecture_of
from steadytrain.components.memory.families import has_formula
from steadytrain.components.memory.shape import Shape, shape_of
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.tasks.registry import load_task, open_encoder

if TYPE_CHECKING:
    from steadytrain.components.memory.groups import Group

ASSUMED_LABELS: Final = 2
"""Classes if a classification's labels are not configured; they use almost no memory."""
ONE_OUTPUT: Final = 1
"""Classes that stand for a model that predicts a number, or without a head: one is nearly none."""


def model_shape(config: RunConfig) -> Shape:
    """Return the sizes of the configured model, by formula.

    Raises:
        BadInput: its architecture is unknown, or has no formula.
    """
    return shape_of(architecture_of(config.model), labels=label_count(config))


def any_model_shape(config: RunConfig) -> Shape:
    """Return the sizes of any model that Transformers can build.

    Raises:
        BadInput: its architecture is unknown, or can't be built here.
    """
    architecture, labels = architecture_of(config.model), label_count(config)
    shape = any_shape(architecture, labels)
    frozen = sum(group.parameters for group in model_groups(config) if group.unfreeze_at is None)
    if not frozen:
        return shape
    # Imported late, because it imports torch.
    from steadytrain.components.memory.traced import traced_still

    return replace(shape, frozen=frozen, still=traced_still(config, architecture, labels))


def model_groups(config: RunConfig) -> Sequence[Group]:
    """Return the parameter groups; empty if all are trained alike, or torch is not installed.

    Raises:
        BadInput: they do not fit the model, or it can't be built here.
    """
    training = config.training
    configured = training.param_groups or training.layer_decay is not None
    if not configured or importlib.util.find_spec("torch") is None:
        return ()
    # Imported late, because it imports torch.
    from steadytrain.components.memory.traced import traced_groups

    return traced_groups(config, architecture_of(config.model), label_count(config))


def any_shape(architecture: Mapping[str, Any], labels: int = 0) -> Shape:
    """Return the shape by formula, or for architectures without one by a trace on fake tensors.

    Args:
        architecture, labels: as for `shape_of`.

    Raises:
        BadInput: there is no formula, and torch is not installed or Transformers can't build the
            model.
    """
    if has_formula(architecture) or importlib.util.find_spec("torch") is None:
        return shape_of(architecture, labels=labels)
    # Imported late, because it imports torch.
    from steadytrain.components.memory.traced import traced_shape

    return traced_shape(architecture, labels)


def label_count(config: RunConfig) -> int:
    """Return the outputs of a head on whole texts; 0 for a language model's head."""
    task = load_task(config.data.task)
    if task.contrasts or task.regresses:
        return ONE_OUTPUT
    if not open_encoder(config.data).labeled:
        return 0
    return sum(len(part.labels or ()) or ASSUMED_LABELS for part in config.data.by_part().values())


def model_name(config: RunConfig) -> str:
    """Return the model's name, as people know it."""
    if config.model.base is None:
        return f"{config.model.config['model_type']} from scratch"
    return config.model.base.removeprefix("hub:")
