"""Where a rank keeps what the optimizer works on if that is on disk (`compute.offload: disk`).

DeepSpeed writes each group of weights, moments and gradients to files of its own. A file belongs to
one rank, and nothing in it survives the attempt: checkpoints have the state.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.components.shared.config.strategies import DISK
from steadytrain.components.shared.workspace import Workspace

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig


def folder_of(config: RunConfig, node: int) -> Path | None:
    """Return the folder for the files of a node's ranks; None if the run keeps none.

    Nodes that share a disk have folders of their own.
    """
    compute = config.compute
    if compute.offload != DISK:
        return None
    own = Workspace.of(config).offloaded
    if compute.offload_path is not None:
        own = Path(compute.offload_path) / config.run_id
    return own / f"node-{node}"


@contextlib.contextmanager
def swept(folder: Path | None) -> Iterator[None]:
    """Remove the folder with everything in it, also what a killed attempt has left there."""
    _remove(folder)
    try:
        yield
    finally:
        _remove(folder)


def _remove(folder: Path | None) -> None:
    if folder is None:
        return
    if folder.exists():
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        # The run's folder, once it has no other node's.
        folder.parent.rmdir()
