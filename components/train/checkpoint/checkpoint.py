"""One checkpoint, in a folder or on S3: check that it is complete and counts, and read it.

A rank checks the lease right before it commits. Between the check and the write, it may be
suspended for a long time, or the request may be delayed in the network, and another supervisor may
take over the run. So the reader decides. Each checkpoint records the generation of the lease that
it was written under. A supervisor that takes over a run writes into the ledger which checkpoints
exist. From then on, only those and the new generation's own checkpoints count. A COMMIT of an older
generation that appears later is never used: it is reported and set aside like a damaged checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from steadytrain.components.shared.errors import BadInput, SteadytrainError, Unreadable
from steadytrain.components.shared.events.types import SupervisorStarted
from steadytrain.components.shared.storage import Storage, open_storage
from steadytrain.components.train.checkpoint.manifest import (
    COMMIT,
    FILE_NAME,
    FIRST_MANIFEST,
    READABLE,
    FileEntry,
    Manifest,
    Slice,
    TensorEntry,
)

if TYPE_CHECKING:
    import torch

    from steadytrain.components.train.checkpoint.snapshot import Regions


PREFIX = "step-"


def is_of_a_step(folder: str) -> bool:
    """Return whether a folder name is a checkpoint's. Other folders are not ours."""
    return re.fullmatch(rf"{PREFIX}[0-9]{{8,}}", folder) is not None


class CheckpointDamaged(SteadytrainError):
    """A checkpoint differs from what was written. The message names the file."""


def of_another_model(name: str) -> CheckpointDamaged:
    """Return the error for a tensor whose name or size differs from the model's."""
    return CheckpointDamaged(
        f"the checkpoint belongs to another model: {name} differs",
        remedy="give the run another name, or use its old configuration",
    )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint by its address, whether or not it exists. As a string: the address."""

    address: str
    storage: Storage = field(compare=False, repr=False)

    @classmethod
    def at(cls, address: str | Path) -> Self:
        """Return the checkpoint at a folder or s3://bucket/prefix. The address ends in step-<n>."""
        storage = open_storage(str(address))
        return cls(storage.uri, storage)

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def step(self) -> int:
        return int(self.name.removeprefix(PREFIX))

    def __str__(self) -> str:
        return self.address

    def is_committed(self) -> bool:
        """Return whether the checkpoint was written completely."""
        return self.storage.exists(COMMIT)

    @cached_property
    def label(self) -> str:
        """The checkpoint's name and commit digest, which changes if the step is committed again.

        Raises:
            CheckpointDamaged: the checkpoint is not committed.
        """
        return f"{self.name} {hashlib.sha256(self._read(COMMIT)).hexdigest()[:12]}"

    @cached_property
    def manifest(self) -> Manifest:
        """The committed manifest.

        Raises:
            CheckpointDamaged: the manifest is not the committed one, or is of another checkpoint.
            BadInput: another version of steadytrain wrote the checkpoint.
        """
        try:
            digest, _, rest = self._read(COMMIT).decode().partition("  ")
        except UnicodeDecodeError as error:
            raise self._damaged(COMMIT, "is not text") from error
        name, whole, _ = rest.partition("\n") if rest else (FIRST_MANIFEST, "\n", "")
        if not whole:
            raise self._damaged(COMMIT, "is cut off")
        if not re.fullmatch(FILE_NAME, name):
            raise self._damaged(COMMIT, f"names {name!r}, which is not a file of this folder")
        content = self._read(name)
        if hashlib.sha256(content).hexdigest() != digest:
            raise self._damaged(name, "its digest differs from the committed one")
        # Trust the content only after its digest was checked.
        version = json.loads(content).get("schema_version")
        if version not in READABLE:
            raise BadInput(
                f"checkpoint {self.address} has schema version {version}; this steadytrain reads "
                f"{' and '.join(map(str, READABLE))}",
                remedy="continue with the version that wrote it, or give this run another name",
            )
        try:
            manifest = Manifest.model_validate_json(content)
        except ValidationError as error:
            raise self._damaged(name, "is not a manifest") from error
        if manifest.step != self.step:
            raise self._damaged(name, f"is from step {manifest.step}")
        return manifest

    def look(self) -> None:
        """Find files that are missing or truncated, without reading their content.

        Raises:
            CheckpointDamaged: a file is missing, or its size is wrong.
            BadInput: another version of steadytrain wrote the checkpoint.
        """
        manifest, sizes = self.manifest, self.storage.sizes()
        for entry in manifest.files:
            if entry.name not in sizes:
                raise self._damaged(entry.name, "is missing")
            self._check_size(entry, sizes[entry.name])

    def check(self, part: str) -> None:
        """Check that the content of a part is unchanged since it was written.

        Raises:
            CheckpointDamaged: a file is missing, or its size or content is wrong.
        """
        slices = (item for entry in self._entries(part).values() for item in entry.slices)
        for file in dict.fromkeys(item.file for item in slices):
            for _ in self._verified(file):
                pass

    def verify(self) -> Manifest:
        """Check that every file is unchanged since it was written, and return the manifest.

        Raises:
            CheckpointDamaged: a file is missing, or its size or content is wrong.
            BadInput: another version of steadytrain wrote the checkpoint.
        """
        for entry in self.manifest.files:
            for _ in self._verified(entry.name):
                pass
        return self.manifest

    def damage(self) -> dict[str, str]:
        """Return what is wrong with each file that differs from what was written, by its name.

        Raises:
            CheckpointDamaged: the manifest cannot be read, so the files are not known.
            BadInput: another version of steadytrain wrote the checkpoint.
        """
        result = {}
        for entry in self.manifest.files:
            try:
                for _ in self._verified(entry.name):
                    pass
            except CheckpointDamaged as error:
                result[entry.name] = error.message.partition(f"/{entry.name}: ")[2]
        return result

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        """Return the full tensors of a part ("model", "optimizer") by name, on the CPU.

        Raises:
            CheckpointDamaged: a file differs from what was written.
        """
        from steadytrain.components.train.checkpoint.snapshot import whole

        result = self._empty(part, "cpu")
        self.copy_into(part, {name: whole(tensor) for name, tensor in result.items()})
        return result

    def outline(self, part: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a part without their content, on the meta device."""
        return self._empty(part, "meta")

    def _empty(self, part: str, device: str) -> dict[str, torch.Tensor]:
        import torch

        return {
            name: torch.empty(item.shape, dtype=getattr(torch, item.dtype), device=device)
            for name, item in self._entries(part).items()
        }

    def copy_into(self, part: str, regions: Regions) -> None:
        """Copy a part's content to the regions of its tensors that a rank holds.

        Skip files with none of these elements. Read the others a few megabytes at a time, so that
        resuming needs no more memory than training.

        Args:
            regions: by tensor name. A rank leaves out tensors of which it holds nothing.

        Raises:
            CheckpointDamaged: a file differs from what was written, or a tensor has another size.
                The regions may then hold a part of the content; see `check`.
        """
        entries = self._entries(part)
        _check_sizes(entries, regions)
        wanted = defaultdict[str, dict[str, Slice]](dict)
        for name, region in regions.items():
            for piece in entries[name].slices:
                if region.needs(piece, entries[name]):
                    wanted[piece.file][name] = piece
        for file, pieces in wanted.items():
            self._copy_file(file, pieces, regions, entries)

    def _copy_file(
        self,
        file: str,
        pieces: Mapping[str, Slice],
        regions: Regions,
        entries: Mapping[str, TensorEntry],
    ) -> None:
        """Copy a file's slices of some tensors, which are given by name."""
        from steadytrain.components.train.checkpoint.snapshot import begin_of, read

        content = self._verified(file)
        missing = {name: math.prod(piece.shape) for name, piece in pieces.items()}
        wanted = {entries[name].name: name for name in pieces}
        try:
            for full, at, values in read(content):
                name = wanted.get(full)
                if name is not None:
                    missing[name] -= len(values)
                    begin = begin_of(pieces[name], entries[name])
                    regions[name].fill(values, begin + at)
        except ValueError as error:
            for _ in content:
                pass  # A wrong digest says more.
            raise self._damaged(file, f"is not a file of tensors ({error})") from error
        if any(missing.values()):
            raise self._damaged(file, f"has not all of {min(filter(missing.get, missing))}")

    def state(self) -> dict[str, Any]:
        """Return the state that all ranks shared, as it was passed to the save."""
        content: dict[str, Any] = json.loads(self._content(self.manifest.state))
        return content

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """Return the state of one rank only; None if the checkpoint was written by fewer ranks."""
        if rank >= self.manifest.world_size:
            return None
        record: dict[str, Any] = json.loads(self._content(self.manifest.ranks[rank]))
        state: dict[str, Any] = record["state"]
        return state

    def _entries(self, part: str) -> dict[str, TensorEntry]:
        """Return the tensors of a part, by their names within it."""
        prefix = f"{part}/"
        return {
            item.name.removeprefix(prefix): item
            for item in self.manifest.tensors
            if item.name.startswith(prefix)
        }

    def _content(self, name: str) -> bytearray:
        content = bytearray()
        for part in self._verified(name):
            content += part
        return content

    def _verified(self, name: str) -> Iterator[bytes]:
        """Yield the file's content. Raise at the end if it differs from what was written."""
        entry = next((entry for entry in self.manifest.files if entry.name == name), None)
        if entry is None:
            raise self._damaged(name, "is not in the manifest's list of files")
        sha, size = hashlib.sha256(), 0
        for part in self._stream(name):
            sha.update(part)
            size += len(part)
            yield part
        self._check_size(entry, size)
        if sha.hexdigest() != entry.digest:
            raise self._damaged(name, "its content has changed since it was written (SHA-256)")

    def _check_size(self, entry: FileEntry, size: int) -> None:
        if size != entry.bytes:
            raise self._damaged(entry.name, f"has {size} bytes, but {entry.bytes} were written")

    def _read(self, name: str) -> bytes:
        return b"".join(self._stream(name))

    def _stream(self, name: str) -> Iterator[bytes]:
        try:
            yield from self.storage.read_stream(name)
        except FileNotFoundError as error:
            raise self._damaged(name, "is missing") from error
        except Unreadable as error:
            raise self._damaged(name, f"cannot be read ({error.message})") from error

    def _damaged(self, name: str, what: str) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"checkpoint file {self.address}/{name}: {what}",
            remedy="the previous checkpoint is used; if this happens again, check the disk",
        )


def _check_sizes(entries: Mapping[str, TensorEntry], regions: Regions) -> None:
    differing = [
        name
        for name, region in regions.items()
        if name not in entries or math.prod(entries[name].shape) != region.size
    ]
    if differing:
        raise of_another_model(min(differing))


@dataclass(frozen=True)
class Lineage:
    """The checkpoints that count now.

    generation: generation of the supervisor that holds the run.
    found: labels of the checkpoints that existed when it took over the run. None means unknown, and
        all checkpoints count.
    """

    generation: int = 0
    found: Collection[str] | None = None

    @classmethod
    def of(cls, supervisor: SupervisorStarted | None) -> Lineage:
        """Return the lineage that the last supervisor in the ledger recorded."""
        return cls(supervisor.generation, supervisor.checkpoints) if supervisor else cls()

    def check(self, checkpoint: Checkpoint) -> None:
        """Reject a checkpoint that does not count.

        Raises:
            CheckpointDamaged: the checkpoint was committed too late, or cannot be read.
        """
        if self.found is None or checkpoint.label in self.found:
            return
        generation = checkpoint.manifest.generation
        # A supervisor that was replaced without noticing must not set aside newer checkpoints.
        if generation < self.generation:
            raise CheckpointDamaged(
                f"checkpoint {checkpoint} was committed by generation {generation} of the run's "
                f"supervisors after generation {self.generation} had taken over",
                remedy="the previous checkpoint is used",
            )
