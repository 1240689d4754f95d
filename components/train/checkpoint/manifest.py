"""The content of a checkpoint's folder. Nothing in this module reads or writes files.

step-<n>/
  <save>-rank-<r>.<part>.safetensors
                        the slices of the part's tensors that rank r keeps
  <save>-rank-<r>.json  RankRecord: those slices, their files, the rank's own state
  <save>-state.json     what all ranks share: schedule, scores, position
  <save>-manifest.json  Manifest: all tensors, and size and SHA-256 of each file
  COMMIT                digest and name of the manifest; written last, only if absent
  DAMAGED               replaces COMMIT: what was found to be wrong

A tensor's name and position are those in the full model, regardless of a strategy's layout, so
another strategy or world size can read it. Each attempt picks a new random `<save>`, so the files
of a killed attempt are never mistaken for parts of another one.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

COMMIT, DAMAGED = "COMMIT", "DAMAGED"
SCHEMA_VERSION: Final = 3
READABLE: Final = (2, SCHEMA_VERSION)
"""Versions that can be read. In version 2, checkpoints had no generation."""
FIRST_MANIFEST = "manifest.json"
"""Name of the manifest in schema version 1, where COMMIT contained only a digest."""


FILE_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
FileName = Annotated[str, Field(pattern=FILE_NAME)]
"""A file in the checkpoint's own folder, never a path."""


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Slice(_Plain):
    """Part of a tensor: in `file`, starting at `offsets` of the tensor, with shape `shape`."""

    file: FileName
    offsets: list[int]
    shape: list[int]


class TensorEntry(_Plain):
    """A full tensor, named `<part>/<name>`, and its slices."""

    name: str
    dtype: str
    shape: list[int]
    slices: list[Slice]


class FileEntry(_Plain):
    """A file as it was written."""

    name: FileName
    bytes: int
    digest: str


class RankRecord(_Plain):
    """What one rank has written. All of it was synced to disk before this record.

    tensors: contain only the rank's own slices.
    state: what no other rank knows, as plain JSON data: the state of its random generators.
    """

    rank: int
    tensors: list[TensorEntry]
    files: list[FileEntry]
    state: dict[str, Any]


class Manifest(_Plain):
    """Everything in a checkpoint except the manifest and the commit themselves.

    name: of the manifest's own file.
    generation: of the supervisor that it was written for; 0 without a supervisor.
    run: name of the run that wrote it; "" if unknown.
    state: name of the file with what all ranks share.
    ranks: names of the files with the ranks' records, in rank order.
    """

    schema_version: Literal[2, 3] = SCHEMA_VERSION
    generation: int = 0
    run: str = ""
    name: FileName
    step: int
    world_size: int
    tensors: list[TensorEntry]
    files: list[FileEntry]
    state: FileName
    ranks: list[FileName]

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(entry.bytes for entry in self.files)

    @property
    def names(self) -> set[str]:
        """Names of everything in the folder."""
        return {COMMIT, self.name, *(entry.name for entry in self.files)}


def merged(records: list[RankRecord]) -> list[TensorEntry]:
    """Merge the ranks' slices into full tensors."""
    entries: dict[str, TensorEntry] = {}
    for entry in (entry for record in records for entry in record.tensors):
        before = entries.get(entry.name)
        slices = [*before.slices, *entry.slices] if before else entry.slices
        entries[entry.name] = entry.model_copy(update={"slices": slices})
    return list(entries.values())
