"""What a checkpoint's folder holds. Nothing here reads or writes.

step-<n>/
  <save>-rank-<r>.<part>.safetensors
                        the slices of the part's tensors that rank r keeps
  <save>-rank-<r>.json  RankRecord: those slices, their files, the rank's own state
  <save>-state.json     what all ranks share: schedule, scores, position
  <save>-manifest.json  Manifest: all tensors, and size and SHA-256 of each file
  COMMIT                digest and name of the manifest; written last, only where absent
  DAMAGED               instead of COMMIT: what was found to be wrong

A tensor is named and placed as in the whole model, never as one strategy lays
it out, so that another strategy or world size can read it. `<save>` is drawn
anew by each attempt: what a killed one left is never taken for a part of another.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

COMMIT, DAMAGED = "COMMIT", "DAMAGED"
SCHEMA_VERSION: Final = 3
READABLE: Final = (2, SCHEMA_VERSION)
"""Versions that can be read; in 2 no checkpoint bore a generation."""
FIRST_MANIFEST = "manifest.json"
"""Name of the manifest in schema version 1, whose COMMIT held a digest only."""


FILE_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
FileName = Annotated[str, Field(pattern=FILE_NAME)]
"""A file of the checkpoint's own folder, never a path."""


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Slice(_Plain):
    """A part of a tensor: in `file`, beginning at `offsets`, of `shape`."""

    file: FileName
    offsets: list[int]
    shape: list[int]


class TensorEntry(_Plain):
    """A whole tensor, named `<part>/<name>`, and the slices that make it up."""

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
    """What one rank has written, every byte of it synced before this record.

    tensors: with the rank's own slices only.
    state: what no other rank knows, as plain JSON data: its random numbers.
    """

    rank: int
    tensors: list[TensorEntry]
    files: list[FileEntry]
    state: dict[str, Any]


class Manifest(_Plain):
    """All of a checkpoint but the manifest and the commit themselves.

    name: of the manifest's own file.
    generation: of the supervisor that it was written for; 0 without one.
    state: name of the file with what all ranks share.
    ranks: names of the files with the ranks' records, in the order of the ranks.
    """

    schema_version: Literal[2, 3] = SCHEMA_VERSION
    generation: int = 0
    name: FileName
    step: int
    world_size: int
    tensors: list[TensorEntry]
    files: list[FileEntry]
    state: FileName
    ranks: list[FileName]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.bytes for entry in self.files)

    @property
    def names(self) -> set[str]:
        """All that lies in the folder."""
        return {COMMIT, self.name, *(entry.name for entry in self.files)}


def merged(records: list[RankRecord]) -> list[TensorEntry]:
    """The whole tensors, from what each rank has of them."""
    found: dict[str, TensorEntry] = {}
    for entry in (entry for record in records for entry in record.tensors):
        before = found.get(entry.name)
        slices = [*before.slices, *entry.slices] if before else entry.slices
        found[entry.name] = entry.model_copy(update={"slices": slices})
    return list(found.values())
