"""The checkpoints of a run: finding, writing and keeping them, in a folder or on S3."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.storage import Storage, open_storage
from steadytrain.components.train.checkpoint.checkpoint import (
    PREFIX,
    Checkpoint,
    CheckpointDamaged,
    is_of_a_step,
)
from steadytrain.components.train.checkpoint.lineage import Lineage
from steadytrain.components.train.checkpoint.manifest import (
    COMMIT,
    DAMAGED,
    FileEntry,
    Manifest,
    RankRecord,
    TensorEntry,
    merged,
)
from steadytrain.components.train.checkpoint.retention import Retention

if TYPE_CHECKING:
    import torch

    from steadytrain.components.train.checkpoint.snapshot import Snapshot

OTHER_RANKS_SECONDS = 900.0
"""How long rank 0 waits for what the others write, once its own is written."""
_POLL_SECONDS = (0.01, 1.0)
_log = logging.getLogger(__name__)


def newest(address: str | Path, lineage: Lineage = Lineage()) -> Checkpoint | None:  # noqa: B008
    """The newest checkpoint that counts and is found whole, or None.

    A damaged one, or one committed too late, is named in the log and set aside, so that it
    never counts again.

    Raises:
        BadInput: another version of steadytrain wrote it.
        StorageError: storage refused.
    """
    for checkpoint in reversed(committed(address)):
        try:
            lineage.check(checkpoint)
            checkpoint.verify()
        except CheckpointDamaged as error:
            _set_aside(checkpoint, error)
        else:
            return checkpoint
    return None


def survey(address: str | Path, lineage: Lineage) -> list[str]:
    """Labels of all checkpoints that count, for the ledger of who takes the run over."""
    labels = []
    for checkpoint in committed(address):
        # Where it does not count, or cannot be read, that is told when a checkpoint is needed.
        with contextlib.suppress(CheckpointDamaged):
            lineage.check(checkpoint)
            labels.append(checkpoint.label)
    return labels


def committed(address: str | Path) -> list[Checkpoint]:
    """All committed checkpoints, the oldest first."""
    return _committed(open_storage(str(address)))


class CheckpointStore:
    """Writes the checkpoints of a run, each rank its own part of them.

    Args:
        keep: checkpoints that stay; a number: that many of the newest.
        fence: called directly before a checkpoint is committed; raises where this
            process may no longer write to the run.
        lineage: whose checkpoints count, and the generation that new ones bear.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        keep: int | Retention,
        fence: Callable[[], None] = lambda: None,
        lineage: Lineage = Lineage(),  # noqa: B008  immutable
    ) -> None:
        self.storage = open_storage(str(address))
        self.retention = Retention(keep) if isinstance(keep, int) else keep
        self.fence, self.lineage = fence, lineage
        self._counted: set[int] = set()

    def path(self, step: int) -> Checkpoint:
        return _checkpoint(self.storage, f"{PREFIX}{step:08d}")

    def has(self, step: int) -> bool:
        """Whether a step needs no save, as it has a checkpoint that counts.

        One that does not count is set aside. Where it cannot be removed, there is no room for
        another of its step: training goes on to the next.
        """
        checkpoint = self.path(step)
        if not checkpoint.is_committed():
            return False
        try:
            self.lineage.check(checkpoint)
        except CheckpointDamaged as error:
            return not _set_aside(checkpoint, error)
        return True

    def load(self, step: int, part: str) -> dict[str, torch.Tensor]:
        """The tensors of a part, of a checkpoint that counts.

        Raises:
            CheckpointDamaged: there is none, or it is not as it was written.
        """
        self.lineage.check(self.path(step))
        return self.path(step).tensors(part)

    def load_into(self, step: int, module: torch.nn.Module) -> None:
        """Puts the weights of a checkpoint that counts into a model that is whole.

        Raises:
            CheckpointDamaged: there is none, or it is not as it was written.
        """
        from steadytrain.components.train.checkpoint.region import whole
        from steadytrain.components.train.checkpoint.state import model_tensors

        self.lineage.check(self.path(step))
        regions = {name: whole(tensor) for name, tensor in model_tensors(module).items()}
        self.path(step).copy_into("model", regions)

    def write_rank(
        self,
        step: int,
        save: str,
        rank: int,
        snapshots: Sequence[Snapshot],
        state: Mapping[str, Any],
    ) -> None:
        """Writes what this rank keeps of a checkpoint.

        Args:
            save: name that no other attempt to save has.
            state: plain JSON data that this rank alone knows.

        Raises:
            NonFiniteState: a value is NaN or infinite.
            StorageError: it could not be written; the checkpoints before it are untouched.
        """
        from steadytrain.components.train.checkpoint.tensor_file import Digested, encode, entries

        for snapshot in snapshots:
            snapshot.check(step)
        storage = self.path(step).storage
        tensors: list[TensorEntry] = []
        files: list[FileEntry] = []
        for snapshot in snapshots:
            name = f"{save}-rank-{rank:04d}.{snapshot.part}.safetensors"
            content = Digested(encode(snapshot))
            try:
                storage.write_stream(name, content, size=snapshot.bytes)
            except StorageError:
                # A full disk gets back what there is.
                with contextlib.suppress(StorageError):
                    for entry in files:
                        storage.delete(entry.name)
                raise
            files.append(content.entry(name))
            tensors += entries(snapshot, name)
        record = RankRecord(rank=rank, tensors=tensors, files=files, state=dict(state))
        storage.write(_rank_record(save, rank), record.model_dump_json().encode())

    def commit(
        self, step: int, save: str, world_size: int, state: bytes, *, given_up: Event
    ) -> Manifest:
        """Makes a checkpoint of what the ranks have written, once all of them have.

        Args:
            state: JSON of what all ranks share.
            given_up: set from elsewhere, it ends the wait for the other ranks.

        Raises:
            StorageError: it could not be written, another process has committed this
                step, or a rank is missing.
        """
        storage = self.path(step).storage
        contents = [
            _await(storage, _rank_record(save, rank), given_up) for rank in range(world_size)
        ]
        records = [RankRecord.model_validate_json(content) for content in contents]
        own = {f"{save}-state.json": state}
        storage.write(f"{save}-state.json", state)
        own |= {_rank_record(save, rank): content for rank, content in enumerate(contents)}
        manifest = Manifest(
            step=step,
            world_size=world_size,
            tensors=merged(records),
            files=[
                *(entry for record in records for entry in record.files),
                *(_entry(name, content) for name, content in own.items()),
            ],
            name=f"{save}-manifest.json",
            state=f"{save}-state.json",
            ranks=[_rank_record(save, rank) for rank in range(world_size)],
            generation=self.lineage.generation,
        )
        content = manifest.model_dump_json().encode()
        storage.write(manifest.name, content)
        self.fence()
        line = f"{hashlib.sha256(content).hexdigest()}  {manifest.name}\n".encode()
        if not storage.write(COMMIT, line, if_absent=True):
            raise StorageError(
                f"checkpoint {self.path(step)} was committed by another process",
                remedy="see to it that one process alone trains this run, then start it again",
            )
        return manifest

    def retain(self, kept: Manifest, best_step: int) -> None:
        """Removes what the retention does not keep, and what killed saves have left.

        First it lists, then it looks at the lease, then it removes: where the run is still
        this process's, whoever takes it over finds the checkpoint that was just committed,
        and nothing of its own is on the list.

        Args:
            kept: of the checkpoint that was just committed; no other save is under way.

        Raises:
            RunBusy: by the fence, where another supervisor has taken the run over.
        """
        storage = self.path(kept.step).storage
        extra, left = set(storage.list()) - kept.names, self._left()
        steps = [item.step for item in _committed(self.storage) if self._counts(item)]
        self.fence()
        for name in extra:
            storage.delete(name)
        for step in self.retention.superfluous(steps, best=best_step):
            self.path(step).storage.delete(COMMIT)
            left.append(self.path(step).name)
        for folder in left:
            self.storage.clear(folder)

    def begin(self) -> None:
        """Removes what killed saves have left; no save is under way."""
        left = self._left()
        self.fence()
        for folder in left:
            self.storage.clear(folder)

    def _left(self) -> list[str]:
        """Folders without a commit, what was set aside left out."""
        marks = [name.partition("/") for name in self.storage.list(PREFIX)]
        marked = {folder for folder, _, name in marks if name in (COMMIT, DAMAGED)}
        return [
            folder
            for folder in self.storage.folders()
            if is_of_a_step(folder) and folder not in marked
        ]

    def _counts(self, checkpoint: Checkpoint) -> bool:
        """Whether it was committed in time; read once, since nobody commits a step again."""
        if checkpoint.step not in self._counted:
            with contextlib.suppress(CheckpointDamaged):
                self.lineage.check(checkpoint)
                self._counted.add(checkpoint.step)
        return checkpoint.step in self._counted


def _committed(storage: Storage) -> list[Checkpoint]:
    folders = (name.partition("/") for name in storage.list(PREFIX))
    return [
        _checkpoint(storage, folder)
        for folder, _, name in folders
        if name == COMMIT and is_of_a_step(folder)
    ]


def _checkpoint(storage: Storage, name: str) -> Checkpoint:
    own = storage.sub(name)
    return Checkpoint(own.uri, own)


def _set_aside(checkpoint: Checkpoint, why: CheckpointDamaged) -> bool:
    """Takes the commit away; False where storage lets nobody do so, and it has to be passed over.

    What breaks reads often breaks writes as well, and must not keep the run from an older one.
    """
    _log.warning("%s", why)
    try:
        checkpoint.storage.write(DAMAGED, f"{time.time():.0f} {why.message}\n".encode())
        checkpoint.storage.delete(COMMIT)
    except StorageError as error:
        _log.warning("checkpoint %s is passed over, but not set aside: %s", checkpoint, error)
        return False
    return True


def _rank_record(save: str, rank: int) -> str:
    return f"{save}-rank-{rank:04d}.json"


def _entry(name: str, content: bytes) -> FileEntry:
    return FileEntry(name=name, bytes=len(content), digest=hashlib.sha256(content).hexdigest())


def _await(storage: Storage, name: str, given_up: Event) -> bytes:
    """The content of an object that another rank writes."""
    end, pause = time.monotonic() + OTHER_RANKS_SECONDS, _POLL_SECONDS[0]
    while True:
        try:
            return storage.read(name)
        except FileNotFoundError:
            pass
        if given_up.wait(pause) or time.monotonic() >= end:
            raise StorageError(
                f"checkpoint {storage.uri} is not committed: {name} was not written",
                remedy="look in the log of that rank; the checkpoint before is used",
            )
        pause = min(2 * pause, _POLL_SECONDS[1])
