"""Find the task that a configuration names, and open its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import EntryPoint
from typing import Final

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import DataConfig, RunConfig
from steadytrain.components.shared.config.training import BALANCED
from steadytrain.components.shared.digest import users_code_digest
from steadytrain.components.shared.errors import BadInput, ConfigError, Problem
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Packager, Scorer, Task, TrainingTask
from steadytrain.components.tasks.encoding.base import Encoder

_FROM_SCRATCH: Final = (
    "causal_lm",
    "supervised_finetuning",
    "masked_lm",
    "sequence_classification",
)
"""Tasks that need no model to start from; they are not imported to find that out."""


def load_task(name: str) -> Task:
    """Return the task that `data.task` names.

    Args:
        name: an entry point's name; or `module:name` of a Task, or of a class that trains for the
            built-in task in its attribute `task`, whose other parts are used with it.

    Raises:
        BadInput: it cannot be imported, or it is not a task.
    """
    found = _imported(name) if ":" in name else plugins.load(plugins.TASKS, name)
    if isinstance(found, Task):
        return found
    base = getattr(found, "task", "")
    if isinstance(found, type) and base in plugins.names(plugins.TASKS):
        return replace(load_task(base), training=found)
    raise BadInput(
        f"data.task = {name!r} is not a task but {found!r}",
        remedy=f"name a steadytrain.components.tasks.base.Task, {_known()}",
    )


def open_encoder(data: DataConfig) -> Encoder:
    """Return the encoder of the configured task.

    Raises:
        BadInput: the task cannot be imported, or does not take these settings.
    """
    return load_task(data.task).encoder(data)


def check_task(config: RunConfig) -> None:
    """Reject settings that the task does not read.

    The task is imported only if there are settings that not every task reads.

    Raises:
        BadInput: the task cannot be imported.
        ConfigError: with every such setting.
    """
    asked = config.training.objectives
    if asked:
        _check_objectives(config, asked)
    if config.evaluation.robustness and not load_task(config.data.task).robustness:
        field = config.evaluation.robustness[0]
        value = repr(getattr(config.evaluation, field))
        why = f"data.task {config.data.task} cannot measure it"
        raise ConfigError([Problem(f"evaluation.{field}", value, why, "leave it out")])
    if config.training.order == BALANCED:
        _check_labeled(config)
    if config.model.dropout.classifier is not None:
        _check_has_head(config)
    if config.model.base is None and config.data.task not in _FROM_SCRATCH:
        _check_reference(config)
    if config.training.curriculum.on and open_encoder(config.data).packed:
        why = (
            f"data.task {config.data.task} packs several documents into a row, so that a row is "
            "neither easy nor difficult"
        )
        raise ConfigError(
            [
                Problem(
                    "training.curriculum.by",
                    repr(config.training.curriculum.by),
                    why,
                    "leave training.curriculum out",
                )
            ]
        )
    task, bits, scored = config.data.task, config.model.adapter.frozen_head, config.evaluation.tasks
    found = []
    if bits != "as_loaded":
        why = f"it is for a causal language model's own head, and data.task {task} has none"
        found.append(Problem("model.adapter.frozen_head", repr(bits), why, "leave it out"))
    if scored:
        why = f"lm-eval's tasks are for language models, and data.task is {task}"
        found.append(Problem("evaluation.tasks", repr(scored), why, "leave them out"))
    if found and not load_task(task).language_model:
        raise ConfigError(found)


def _check_labeled(config: RunConfig) -> None:
    if not open_encoder(config.data).labeled:
        why = f"data.task {config.data.task} has no labels to balance"
        raise ConfigError([Problem("training.order", BALANCED, why, "use training.order seeded")])


def _check_has_head(config: RunConfig) -> None:
    if load_task(config.data.task).language_model:
        why = f"data.task {config.data.task} trains a language model, which has no classifier"
        value = repr(config.model.dropout.classifier)
        raise ConfigError([Problem("model.dropout.classifier", value, why, "leave it out")])


def _check_reference(config: RunConfig) -> None:
    task = config.data.task
    if load_task(task).reference:
        why = f"data.task {task} compares the model with the one that it starts from"
        remedy = "name a model that has been trained, best on the preferred answers"
        raise ConfigError([Problem("model.base", "None", why, remedy)])


def _check_objectives(config: RunConfig, asked: Sequence[str]) -> None:
    task = config.data.task
    known = load_task(task).objectives
    found = [
        Problem(
            f"training.{name}",
            repr(getattr(config.training, name).model_dump(exclude_unset=True)),
            f"the loss of data.task {task} does not include it",
            "leave it out, or use a task that does",
        )
        for name in asked
        if name not in known
    ]
    if found:
        raise ConfigError(found)


@dataclass(frozen=True)
class OpenTask:
    """The parts of a run's task. Each is opened on first use, because most of them import torch.

    Raises:
        BadInput: the task, or the part that is opened, cannot be imported.
    """

    config: RunConfig
    data: DataRecord

    @cached_property
    def training(self) -> TrainingTask:
        return self._task.training(self.config, self.data)

    @cached_property
    def scorer(self) -> Scorer:
        return self._task.scorer(self.config, self.data)

    @cached_property
    def packager(self) -> Packager:
        return self._task.packager(self.config, self.data)

    @cached_property
    def _task(self) -> Task:
        return load_task(self.config.data.task)


def task_code(name: str) -> str:
    """Return the digest of the code of another package's task; "" for a built-in task."""
    ours = plugins.is_ours(plugins.TASKS, name)
    return "" if ours else users_code_digest(plugins.address(plugins.TASKS, name) or name)


def _imported(name: str) -> object:
    remedy = f"use {_known()}, or module:NAME of a task that can be imported"
    with foreign(f"data.task = {name!r} cannot be used", remedy):
        return EntryPoint("task", name, plugins.TASKS).load()


def _known() -> str:
    return f"one of {', '.join(plugins.names(plugins.TASKS))}"
