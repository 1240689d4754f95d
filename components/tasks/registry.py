"""Find the task that a configuration names."""

from __future__ import annotations

import importlib
from typing import cast

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Task

_TASKS = "steadytrain.components.tasks"
BUILT_IN = {
    "causal_lm": f"{_TASKS}.causal_lm:CausalLanguageModel",
    "supervised_finetuning": f"{_TASKS}.causal_lm:CausalLanguageModel",
    "sequence_classification": f"{_TASKS}.sequence_classification:SequenceClassification",
}


def open_task(config: RunConfig, data: DataRecord) -> Task:
    """Return the task of a run.

    Raises:
        BadInput: the task that `data.task` names cannot be imported.
    """
    name = config.data.task
    module, _, kind = BUILT_IN.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(
            f"data.task = {name!r} cannot be used: {error}",
            remedy=f"one of {', '.join(BUILT_IN)}, or module:Class of a task that can be imported",
        ) from error
    return cast(Task, found(config, data))
