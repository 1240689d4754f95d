"""One checkpoint, in a folder or on S3: whether it is whole, and what it holds."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from steadytrain.components.shared.errors import BadInput, SteadytrainError, Unreadable
from steadytrain.components.shared.storage import Storage, open_storage
from steadytrain.components.train.checkpoint.manifest import (
    COMMIT,
    FILE_NAME,
    FIRST_MANIFEST,
    READABLE,
    Manifest,
    Slice,
    TensorEntry,
)

if TYPE_CHECKING:
    import torch

    from steadytrain.components.train.checkpoint.region import Regions

PREFIX = "step-"


def is_of_a_step(folder: str) -> bool:
    """Whether a folder's name is that of a checkpoint; others are none of ours."""
    return re.fullmatch(rf"{PREFIX}[0-9]{{8,}}", folder) is not None


class CheckpointDamaged(SteadytrainError):
    """A checkpoint is not what was written; the message names the file."""


def of_another_model(name: str) -> CheckpointDamaged:
    """Where a tensor's name or size is not the model's."""
    return CheckpointDamaged(
        f"the checkpoint is of another model: {name} differs",
        remedy="give the run another name, or take its old configuration",
    )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint by its address, whether it is there or not. As a string: the address."""

    address: str
    storage: Storage = field(compare=False, repr=False)

    @classmethod
    def at(cls, address: str | Path) -> Self:
        """The checkpoint at a folder or s3://bucket/prefix, which ends in step-<n>."""
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
        """Whether it was written to its end."""
        return self.storage.exists(COMMIT)

    @cached_property
    def label(self) -> str:
        """Its name and which commit it is; another one of the same step has another label.

        Raises:
            CheckpointDamaged: it is not committed.
        """
        return f"{self.name} {hashlib.sha256(self._read(COMMIT)).hexdigest()[:12]}"

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest that was committed.

        Raises:
            CheckpointDamaged: it is another one, or of another checkpoint.
            BadInput: another version of steadytrain wrote it.
        """
        try:
            digest, _, rest = self._read(COMMIT).decode().partition("  ")
        except UnicodeDecodeError as error:
            raise self._damaged(COMMIT, "is not text") from error
        name, whole, _ = rest.partition("\n") if rest else (FIRST_MANIFEST, "\n", "")
        if not whole:
            raise self._damaged(COMMIT, "is cut off")
        if not re.fullmatch(FILE_NAME, name):
            raise self._damaged(COMMIT, f"names {name!r}, which is no file of this folder")
        content = self._read(name)
        if hashlib.sha256(content).hexdigest() != digest:
            raise self._damaged(name, "its digest is not the committed one")
        # Only what has the right digest can be taken at its word.
        version = json.loads(content).get("schema_version")
        if version not in READABLE:
            raise BadInput(
                f"checkpoint {self.address} has schema version {version}; this steadytrain reads "
                f"{' and '.join(map(str, READABLE))}",
                remedy="go on with the version that wrote it, or give this run another name",
            )
        try:
            manifest = Manifest.model_validate_json(content)
        except ValidationError as error:
            raise self._damaged(name, "is no manifest") from error
        if manifest.step != self.step:
            raise self._damaged(name, f"is of step {manifest.step}")
        return manifest

    def verify(self) -> Manifest:
        """The manifest, after every file was found as it was written.

        Raises:
            CheckpointDamaged: a file is missing, or has another size or content.
            BadInput: another version of steadytrain wrote it.
        """
        for entry in self.manifest.files:
            for _ in self._verified(entry.name):
                pass
        return self.manifest

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        """The whole tensors of a part ("model", "optimizer") by name, on the CPU.

        Raises:
            CheckpointDamaged: a file is not as it was written.
        """
        import torch

        from steadytrain.components.train.checkpoint.region import whole

        found = {
            name: torch.empty(item.shape, dtype=getattr(torch, item.dtype))
            for name, item in self._entries(part).items()
        }
        self.copy_into(part, {name: whole(tensor) for name, tensor in found.items()})
        return found

    def has(self, part: str) -> bool:
        """Whether it holds anything of a part: an optimizer that made no step has no state."""
        return bool(self._entries(part))

    def copy_into(self, part: str, regions: Regions) -> None:
        """Copies what it holds of a part to where a rank has its own stretch of it.

        Files that hold nothing of it are not read; of the others one at a time is in memory.

        Args:
            regions: by the tensors' names; those of a rank that holds nothing of a tensor lack.

        Raises:
            CheckpointDamaged: a file is not as it was written, or a tensor is of another size.
        """
        from steadytrain.components.train.checkpoint.region import begin_of
        from steadytrain.components.train.checkpoint.tensor_file import decode

        entries = self._entries(part)
        _check_sizes(entries, regions)
        wanted = defaultdict[str, list[tuple[str, Slice]]](list)
        for name, region in regions.items():
            for piece in entries[name].slices:
                if region.needs(piece, entries[name]):
                    wanted[piece.file].append((name, piece))
        for file, pieces in wanted.items():
            held = decode(self._content(file))
            for name, piece in pieces:
                entry = entries[name]
                regions[name].fill(held[entry.name], begin_of(piece, entry))

    def state(self) -> dict[str, Any]:
        """What all ranks shared, as it was given."""
        content: dict[str, Any] = json.loads(self._content(self.manifest.state))
        return content

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """What one rank alone knew; None where there were fewer ranks."""
        if rank >= self.manifest.world_size:
            return None
        record: dict[str, Any] = json.loads(self._content(self.manifest.ranks[rank]))
        state: dict[str, Any] = record["state"]
        return state

    def _entries(self, part: str) -> dict[str, TensorEntry]:
        """The tensors of a part, by their names within it."""
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
        """The file's content; raises at its end where it is not what was written."""
        entry = next((entry for entry in self.manifest.files if entry.name == name), None)
        if entry is None:
            raise self._damaged(name, "is not in the manifest's list of files")
        sha, size = hashlib.sha256(), 0
        for part in self._stream(name):
            sha.update(part)
            size += len(part)
            yield part
        if size != entry.bytes:
            raise self._damaged(name, f"has {size} bytes, {entry.bytes} were written")
        if sha.hexdigest() != entry.digest:
            raise self._damaged(name, "has another content than was written (SHA-256)")

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
            remedy="the checkpoint before it is used; look at the disk if this happens again",
        )


def _check_sizes(entries: Mapping[str, TensorEntry], regions: Regions) -> None:
    differing = [
        name
        for name, region in regions.items()
        if name not in entries or math.prod(entries[name].shape) != region.size
    ]
    if differing:
        raise of_another_model(min(differing))
