"""The model that leaves training, as a plain folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.storage.local import sync_file, sync_folder
from steadytrain.components.tasks.base import Task


def export_model(
    task: Task, module: torch.nn.Module, target: Path, fence: Callable[[], None] = lambda: None
) -> None:
    """Writes the model to `target`, whole or not at all; an older one is replaced.

    Args:
        fence: called directly before it is; raises where this process may no longer do that.

    Raises:
        StorageError: it could not be written.
    """
    partial = target.with_name(f".partial-{target.name}")
    replaced = target.with_name(f".replaced-{target.name}")
    try:
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        task.export(module, partial)
        _sync(partial)
        fence()
        if target.exists():
            target.replace(replaced)
        partial.replace(target)
        sync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"the model cannot be written to {target}: {error}",
            remedy="free space or give write permission there, then start the run again: "
            "it continues from its last checkpoint",
        ) from error


def merged(task: Task, module: torch.nn.Module, target: Path) -> torch.nn.Module:
    """A model with its adapters added to the weights of its base, as the base has them.

    By way of a folder beside `target`: in memory the base may be quantized.

    Raises:
        StorageError: the adapters could not be written.
    """
    beside = target.with_name(f".adapters-{target.name}")
    export_model(task, module, beside)
    whole: torch.nn.Module = task.load_exported(beside)["model"]
    shutil.rmtree(beside)
    return whole


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)
    sync_folder(folder)
