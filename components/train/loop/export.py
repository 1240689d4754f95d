"""Export the trained model as a plain folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.foreign import system_errors
from steadytrain.components.shared.storage.local import (
    follow_umask,
    room_for,
    sync_file,
    sync_folder,
)
from steadytrain.components.tasks.base import Packager


def export_model(
    packager: Packager,
    module: torch.nn.Module,
    target: Path,
    fence: Callable[[], None] = lambda: None,
) -> None:
    """Write the task's model to `target`; see `write_model`."""
    write_model(partial(packager.export, module), target, fence)


def write_model(
    write: Callable[[Path], None], target: Path, fence: Callable[[], None] = lambda: None
) -> None:
    """Write a model to `target`, completely or not at all, replacing an older one.

    Args:
        write: writes the model to an empty folder.
        fence: called right before the replacement; raises if this process may no longer do that.

    Raises:
        StorageError: the model could not be written.
    """
    unfinished = target.with_name(f".partial-{target.name}")
    replaced = target.with_name(f".replaced-{target.name}")
    try:
        for leftover in (unfinished, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with system_errors():
            write(unfinished)
        follow_umask(unfinished)
        _sync(unfinished)
        fence()
        if target.exists():
            target.replace(replaced)
        unfinished.replace(target)
        sync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise StorageError(
            f"the model cannot be written to {target}: {error}",
            remedy=f"{room_for(error)}, then start the run again: it continues from its last "
            "checkpoint",
        ) from error


def merged(packager: Packager, module: torch.nn.Module, target: Path) -> torch.nn.Module:
    """Return a model with its adapters merged into the base model's original weights.

    Go through a folder next to `target`, because the base model may be quantized in memory.

    Raises:
        StorageError: the adapters could not be written.
    """
    adapters = target.with_name(f".adapters-{target.name}")
    export_model(packager, module, adapters)
    whole: torch.nn.Module = packager.load_exported(adapters)["model"]
    shutil.rmtree(adapters)
    return whole


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)
    sync_folder(folder)
