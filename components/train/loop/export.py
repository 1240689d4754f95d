"""Export the trained model as a plain folder, and measure how long it takes for one sequence."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch

from steadytrain.components.memory.model import architecture_of, label_count
from steadytrain.components.memory.random_model import plain_model
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import LatencyMeasured
from steadytrain.components.shared.storage.local import (
    follow_umask,
    room_for,
    sync_file,
    sync_folder,
)
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import Packager
from steadytrain.components.tasks.packaging import system_errors


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
    beside = target.with_name(f".adapters-{target.name}")
    export_model(packager, module, beside)
    whole: torch.nn.Module = packager.load_exported(beside)["model"]
    shutil.rmtree(beside)
    return whole


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)
    sync_folder(folder)


# How long the exported model takes for one sequence, measured before training.
#
# The time depends on the architecture and the device, not on the weights.

_WARM_UP: Final = 3
_PASSES: Final = 11


def latency_is_known(workspace: Workspace) -> bool:
    """Return whether an earlier attempt of the run has measured it."""
    return any(isinstance(event, LatencyMeasured) for event in read_events(workspace.events))


def measure_latency(config: RunConfig, device: torch.device) -> float:
    """Return the median milliseconds of a forward pass of one sequence, in float32.

    The process's random numbers go on as if nothing had been measured.

    Raises:
        BadInput: the architecture is unknown.
    """
    with torch.random.fork_rng(), device:
        model = plain_model(architecture_of(config.model), label_count(config)).eval()
        tokens = torch.zeros(1, config.data.sequence_length, dtype=torch.long)
    seconds = [_pass(model, tokens) for _ in range(_WARM_UP + _PASSES)][_WARM_UP:]
    return 1e3 * statistics.median(seconds)


@torch.inference_mode()
def _pass(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    began = time.perf_counter()
    model(input_ids=tokens)
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return time.perf_counter() - began
