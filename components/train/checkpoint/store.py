"""Saving, finding and keeping the checkpoints of a run."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.storage.local import sync_file, sync_folder
from steadytrain.components.train.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    STATE,
    CheckpointDamaged,
    FileEntry,
    Manifest,
    Slice,
    TensorEntry,
    is_committed,
    verify,
)

if TYPE_CHECKING:
    import torch

_PARTIAL, _DAMAGED, _STEP = ".partial-", "damaged-", "step-"
_log = logging.getLogger(__name__)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that was committed and is found whole, or None.

    A damaged one is named in the log and set aside, so that it never counts again.
    """
    for checkpoint in reversed(committed(folder)):
        try:
            verify(checkpoint)
        except CheckpointDamaged as error:
            _log.warning("%s", error)
            _replace(checkpoint, folder / f"{_DAMAGED}{checkpoint.name}")
        else:
            return checkpoint
    return None


def committed(folder: Path) -> list[Path]:
    """All committed checkpoints, the oldest first."""
    return sorted(path for path in folder.glob(f"{_STEP}*") if is_committed(path))


def load_tensors(checkpoint: Path, part: str) -> dict[str, torch.Tensor]:
    """The whole tensors of a part ("model", "optimizer") by name, on the CPU.

    Raises:
        CheckpointDamaged: a file is not as it was written.
    """
    import torch
    from safetensors import safe_open

    manifest = verify(checkpoint)
    tensors = {}
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        for entry in (item for item in manifest.tensors if item.name.startswith(f"{part}/")):
            whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for piece in entry.slices:
                if piece.file not in files:
                    opened = safe_open(checkpoint / piece.file, framework="pt")
                    files[piece.file] = stack.enter_context(opened)
                place = tuple(
                    slice(start, start + size)
                    for start, size in zip(piece.offsets, piece.shape, strict=True)
                )
                whole[place] = files[piece.file].get_tensor(entry.name)
            tensors[entry.name.removeprefix(f"{part}/")] = whole
    return tensors


def load_state(checkpoint: Path) -> dict[str, Any]:
    """What was given to `save` as `state`."""
    content: dict[str, Any] = json.loads((checkpoint / STATE).read_bytes())
    return content


class CheckpointStore:
    """The checkpoints of a run, in a folder that one process writes.

    Args:
        fence: called directly before a checkpoint is committed; raises where this
            process may no longer write to the run.
    """

    def __init__(
        self, folder: Path, *, keep: int, fence: Callable[[], None] = lambda: None
    ) -> None:
        self.folder, self.keep, self.fence = folder, keep, fence

    def path(self, step: int) -> Path:
        return self.folder / f"{_STEP}{step:08d}"

    def save(
        self,
        step: int,
        *,
        parts: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        world_size: int,
    ) -> int:
        """Writes a checkpoint; it appears whole or not at all.

        Args:
            parts: tensors by part and name; each part becomes a file.
            state: plain JSON data.

        Returns:
            Its size in bytes.

        Raises:
            StorageError: it could not be written; those before it are untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear()
        partial = self.folder / f"{_PARTIAL}{_STEP}{step:08d}"
        with _named(partial):
            partial.mkdir()
            size = _write(partial, step, parts, state, world_size, self.fence)
            _replace(partial, self.path(step))
            sync_folder(self.folder)
        return size

    def retain(self, best_step: int) -> None:
        """Removes all but the newest `keep` and the best."""
        for checkpoint in committed(self.folder)[: -self.keep]:
            if checkpoint != self.path(best_step):
                _remove(checkpoint)

    def _clear(self) -> None:
        """What a kill in mid-save, or in mid-removal, has left."""
        for path in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path)


def _write(
    folder: Path,
    step: int,
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    world_size: int,
    fence: Callable[[], None],
) -> int:
    from safetensors.torch import save_file

    entries = []
    for part, tensors in parts.items():
        file = f"{part}.safetensors"
        named = {
            f"{part}/{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()
        }
        save_file(named, folder / file)
        entries += [_whole(name, tensor, file) for name, tensor in named.items()]
    (folder / STATE).write_text(json.dumps(state))
    files = [
        FileEntry(name=path.name, bytes=path.stat().st_size, digest=file_digest(path))
        for path in sorted(folder.iterdir())
    ]
    manifest = Manifest(step=step, world_size=world_size, tensors=entries, files=files)
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    for path in folder.iterdir():
        sync_file(path)
    fence()
    (folder / COMMIT).write_text(file_digest(folder / MANIFEST))
    sync_file(folder / COMMIT)
    sync_folder(folder)
    return sum(entry.bytes for entry in files)


def _whole(name: str, tensor: torch.Tensor, file: str) -> TensorEntry:
    shape = list(tensor.shape)
    return TensorEntry(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        slices=[Slice(file=file, offsets=[0] * len(shape), shape=shape)],
    )


def _replace(source: Path, target: Path) -> None:
    """Renames a folder over another; a rename alone needs the target to be empty."""
    if target.exists():
        _remove(target)
    source.replace(target)


def _remove(folder: Path) -> None:
    """Removes a folder; it stops counting before its first file goes."""
    doomed = folder.with_name(f"{_PARTIAL}removed-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.replace(doomed)
    shutil.rmtree(doomed)


@contextlib.contextmanager
def _named(partial: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"checkpoint {partial.name.removeprefix(_PARTIAL)} cannot be written to "
            f"{partial.parent}: {error}",
            remedy="free space or give write permission there, then start the run again: "
            "it continues from the checkpoint before",
        ) from error
