"""What a checkpoint's folder holds, and whether it still holds it.

step-<n>/
  model.safetensors, optimizer.safetensors
                    tensors by global name, each slice with its place in the whole
  state.json        everything else: schedule, random numbers, scores
  manifest.json     tensors, and size and SHA-256 of each file
  COMMIT            SHA-256 of the manifest; written last

A tensor is named and placed as in the whole model, never as one strategy lays
it out, so that another strategy or world size can read it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.components.shared.records import Record

MANIFEST, COMMIT, STATE = "manifest.json", "COMMIT", "state.json"


class CheckpointDamaged(SteadytrainError):
    """A checkpoint is not what was written; the message names the file."""


class Slice(Record):
    """A part of a tensor: in `file`, beginning at `offsets`, of `shape`."""

    file: str
    offsets: list[int]
    shape: list[int]


class TensorEntry(Record):
    """A whole tensor and the slices that make it up."""

    name: str
    dtype: str
    shape: list[int]
    slices: list[Slice]


class FileEntry(Record):
    """A file as it was written."""

    name: str
    bytes: int
    digest: str


class Manifest(Record):
    """All of a checkpoint but the manifest and the commit themselves."""

    step: int
    world_size: int
    tensors: list[TensorEntry]
    files: list[FileEntry]


def is_committed(folder: Path) -> bool:
    """Whether the checkpoint was written to its end."""
    return (folder / COMMIT).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
        CheckpointDamaged: it is not the one that was committed.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        committed = (folder / COMMIT).read_text()
        if file_digest(folder / MANIFEST) != committed.strip():
            raise _damaged(folder / MANIFEST, "its digest is not the committed one")
        return Manifest.model_validate_json(content)
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise _damaged(folder / MANIFEST, f"cannot be read ({type(error).__name__})") from error


def verify(folder: Path) -> Manifest:
    """The manifest, after every file was found as it was written.

    Raises:
        CheckpointDamaged: a file is missing, or has another size or content.
    """
    manifest = read_manifest(folder)
    for entry in manifest.files:
        file = folder / entry.name
        if not file.is_file():
            raise _damaged(file, "is missing")
        if file.stat().st_size != entry.bytes:
            raise _damaged(file, f"has {file.stat().st_size} bytes, {entry.bytes} were written")
        if file_digest(file) != entry.digest:
            raise _damaged(file, "has another content than was written (SHA-256)")
    return manifest


def _damaged(file: Path, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"checkpoint file {file}: {what}",
        remedy="the checkpoint before it is used; look at the disk if this happens again",
    )
