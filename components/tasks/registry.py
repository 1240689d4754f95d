"""Find the task that a configuration names, and open its parts."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import EntryPoint
from pathlib import Path

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import DataConfig, RunConfig
from steadytrain.components.shared.digest import users_code_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Packager, Scorer, Task, TrainingTask
from steadytrain.components.tasks.encoding.base import Encoder


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
        found = self._task.training(self.config, self.data)
        if hasattr(found, "loss"):
            # Its old name. The training would use the loss of the base class instead.
            raise BadInput(
                f"data.task = {self.config.data.task!r}: the method `loss` of "
                f"{type(found).__name__} is not called",
                remedy="rename it to `compute_loss`",
            )
        return found

    @cached_property
    def scorer(self) -> Scorer:
        return self._task.scorer(self.config, self.data)

    @cached_property
    def packager(self) -> Packager:
        return self._task.packager(self.config, self.data)

    @property
    def is_compared_with_base(self) -> bool:
        """Whether the loss itself compares the model with model.base."""
        return self._task.reference

    @cached_property
    def _task(self) -> Task:
        return load_task(self.config.data.task)


def task_code(name: str) -> str:
    """Return the digest of the code of another package's task; "" for a built-in task."""
    ours = plugins.is_ours(plugins.TASKS, name)
    return "" if ours else users_code_digest(plugins.address(plugins.TASKS, name) or name)


def _imported(name: str) -> object:
    remedy = f"use {_known()}, or module:NAME of a task that can be imported"
    _reach_current_folder()
    with foreign(f"data.task = {name!r} cannot be used", remedy, runs_code=True):
        return EntryPoint("task", name, plugins.TASKS).load()


def _reach_current_folder() -> None:
    """Let modules in the current folder be imported, as they are with `python -m`.

    They come last, so that a file there never hides a package.
    """
    with contextlib.suppress(FileNotFoundError):
        here = str(Path.cwd())
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)


def _known() -> str:
    return f"one of {', '.join(plugins.names(plugins.TASKS))}"
