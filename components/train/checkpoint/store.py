"""Find, write and retain a run's checkpoints, in a folder or on S3."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.storage import Storage, open_storage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.attempt import OTHER_RANKS_SECONDS
from steadytrain.components.train.checkpoint.cadence import Retention
from steadytrain.components.train.checkpoint.checkpoint import (
    PREFIX,
    Checkpoint,
    CheckpointDamaged,
    Lineage,
    is_of_a_step,
)
from steadytrain.components.train.checkpoint.manifest import (
    COMMIT,
    DAMAGED,
    FileEntry,
    Manifest,
    RankRecord,
    TensorEntry,
    merged,
)

if TYPE_CHECKING:
    import torch

    from steadytrain.components.train.checkpoint.snapshot import Snapshot


_POLL_SECONDS = (0.01, 1.0)
_OWN_FILE = re.compile(
    # A part is named after its component, too: rank-0000.component-ema.safetensors.
    r"(.*-)?(rank-[0-9]{4,}(\.[^/]+\.safetensors|\.json)|(state|manifest)\.json)"
)
"""The names of files of a checkpoint, committed or not."""
_log = logging.getLogger(__name__)


def newest(
    address: str | Path,
    lineage: Lineage = Lineage(),  # noqa: B008  immutable
    *,
    read: bool = True,
    skipped: Callable[[Checkpoint, CheckpointDamaged], object] = lambda *_: None,
) -> Checkpoint | None:
    """Return the newest checkpoint that counts and is intact, or None.

    A checkpoint that is damaged or was committed too late is set aside, so it never counts again.

    Args:
        read: compare the digest of every file. Otherwise check only names and sizes, because
            loading a checkpoint compares the digests of what it loads.
        skipped: called with each checkpoint that was set aside, and why. The log has it too.

    Raises:
        BadInput: another version of steadytrain wrote the checkpoint.
        StorageError: storage failed.
    """
    for checkpoint in reversed(committed(address)):
        try:
            lineage.check(checkpoint)
            if read:
                checkpoint.verify()
            else:
                checkpoint.look()
        except CheckpointDamaged as error:
            _set_aside(checkpoint, error)
            skipped(checkpoint, error)
        else:
            return checkpoint
    return None


def survey(address: str | Path, lineage: Lineage) -> list[str]:
    """Return the labels of all checkpoints that count, for the ledger of a new supervisor."""
    labels = []
    for checkpoint in committed(address):
        # If it does not count or cannot be read, this is reported when a checkpoint is needed.
        with contextlib.suppress(CheckpointDamaged):
            lineage.check(checkpoint)
            labels.append(checkpoint.label)
    return labels


def refuse_foreign(address: str | Path, run: str, known: Collection[str]) -> None:
    """Refuse to train where something lies that this run did not write.

    It would be removed or skipped like a damaged checkpoint, and training would start without it.

    Args:
        run: the run's name.
        known: labels or names of checkpoints that the run's ledger has, which count whoever wrote
            them: a run's folder may have been copied or renamed together with its ledger.

    Raises:
        BadInput: something there is not a checkpoint of steadytrain, or is one of another run.
        StorageError: storage failed.
    """
    storage = open_storage(str(address))
    for folder in storage.folders():
        names = storage.sub(folder).list() if is_of_a_step(folder) else []
        if not folder.startswith(".") and (not is_of_a_step(folder) or not _ours(names)):
            raise _foreign(storage.sub(folder).uri, "was not written by steadytrain")
    for file in filter(is_of_a_step, storage.list(PREFIX)):
        raise _foreign(storage.sub(file).uri, "is a file, not a folder of steadytrain")
    for checkpoint in _committed(storage):
        # If it cannot be read, this is reported when a checkpoint is needed.
        with contextlib.suppress(CheckpointDamaged):
            origin = checkpoint.manifest.run
            if origin not in ("", run) and not {checkpoint.label, checkpoint.name} & {*known}:
                raise _foreign(str(checkpoint), f"was written by run {origin!r}")


def _ours(names: Sequence[str]) -> bool:
    return all(name in (COMMIT, DAMAGED) or _OWN_FILE.fullmatch(name) for name in names)


def _foreign(where: str, origin: str) -> BadInput:
    return BadInput(
        f"checkpoint {where} {origin}, so this run cannot continue from it",
        remedy="move it out of the run's folder; to start from its weights, export them as a model "
        "and set model.base, or continue the run that wrote it",
    )


def committed(address: str | Path) -> list[Checkpoint]:
    """Return all committed checkpoints, the oldest first."""
    return _committed(open_storage(str(address)))


class CheckpointStore:
    """Writes the checkpoints of a run. Each rank writes its own part of them.

    Args:
        keep: which checkpoints to keep; a number keeps that many of the newest.
        fence: called right before a checkpoint is committed; raises if this process may no longer
            write to the run.
        lineage: which checkpoints count, and the generation that new ones record.
        run: name of the run, which new ones record.
    """

    def __init__(
        self,
        address: str | Path,
        *,
        keep: int | Retention,
        fence: Callable[[], None] = lambda: None,
        lineage: Lineage = Lineage(),  # noqa: B008  immutable
        run: str = "",
    ) -> None:
        self.storage = open_storage(str(address))
        self.retention = Retention(keep) if isinstance(keep, int) else keep
        self.fence, self.lineage = fence, lineage
        self.run = run
        self._counted: set[int] = set()

    def path(self, step: int) -> Checkpoint:
        return _checkpoint(self.storage, f"{PREFIX}{step:08d}")

    def has(self, step: int) -> bool:
        """Return whether a step needs no save, because it has a checkpoint that counts.

        A checkpoint that does not count is set aside. If it cannot be removed, this step cannot
        have another one, and training moves on to the next.
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
        """Return the tensors of a part, from a checkpoint that counts.

        Raises:
            CheckpointDamaged: there is no such checkpoint, or it differs from what was written.
        """
        self.lineage.check(self.path(step))
        return self.path(step).tensors(part)

    def load_into(self, step: int, module: torch.nn.Module) -> None:
        """Load the weights of a checkpoint that counts into a full, unsharded model.

        Raises:
            CheckpointDamaged: there is no such checkpoint, or it differs from what was written. The
                model is unchanged.
        """
        from steadytrain.components.train.checkpoint.state import restore_model

        checkpoint = self.path(step)
        self.lineage.check(checkpoint)
        # Copying begins before the digests are known.
        checkpoint.check("model")
        restore_model(module, checkpoint)

    def write_rank(
        self,
        step: int,
        save: str,
        rank: int,
        snapshots: Sequence[Snapshot],
        state: Mapping[str, Any],
    ) -> None:
        """Write this rank's part of a checkpoint.

        Args:
            save: name of this save; no other attempt uses it.
            state: plain JSON data that only this rank knows.

        Raises:
            NonFiniteState: a value is NaN or infinite.
            StorageError: the part could not be written. Earlier checkpoints are not affected.
        """
        from steadytrain.components.train.checkpoint.snapshot import Digested, encode, entries

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
                # On a full disk, free what was already written.
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
        """Commit the checkpoint once all ranks have written their parts.

        Args:
            state: JSON of what all ranks share.
            given_up: set by another thread to end the wait for the other ranks.

        Raises:
            StorageError: it could not be written, another process committed this step, or a rank's
                part is missing.
        """
        storage = self.path(step).storage
        contents = [
            _await(storage, _rank_record(save, rank), given_up) for rank in range(world_size)
        ]
        records = [RankRecord.model_validate_json(content) for content in contents]
        files = {f"{save}-state.json": state}
        storage.write(f"{save}-state.json", state)
        files |= {_rank_record(save, rank): content for rank, content in enumerate(contents)}
        manifest = Manifest(
            step=step,
            world_size=world_size,
            tensors=merged(records),
            files=[
                *(entry for record in records for entry in record.files),
                *(_entry(name, content) for name, content in files.items()),
            ],
            name=f"{save}-manifest.json",
            state=f"{save}-state.json",
            ranks=[_rank_record(save, rank) for rank in range(world_size)],
            generation=self.lineage.generation,
            run=self.run,
        )
        content = manifest.model_dump_json().encode()
        storage.write(manifest.name, content)
        self.fence()
        line = f"{hashlib.sha256(content).hexdigest()}  {manifest.name}\n".encode()
        if not storage.write(COMMIT, line, if_absent=True):
            raise StorageError(
                f"checkpoint {self.path(step)} was committed by another process",
                remedy="make sure that only one process trains this run, then start it again",
            )
        return manifest

    def retain(self, kept: Manifest, best_step: int) -> None:
        """Remove what the retention does not keep, and leftovers of killed saves.

        The order is: list, check the lease, remove. If this process still holds the lease after the
        listing, a supervisor that takes over later finds the checkpoint that was just committed,
        and nothing of its own is on the list.

        Args:
            kept: manifest of the checkpoint that was just committed. No other save is in progress.

        Raises:
            RunBusy: from the fence, if another supervisor took over the run.
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
        """Remove leftovers of killed saves. No save is in progress."""
        left = self._left()
        self.fence()
        for folder in left:
            self.storage.clear(folder)

    def _left(self) -> list[str]:
        """Return the folders without a commit, except those that were set aside."""
        marks = [name.partition("/") for name in self.storage.list(PREFIX)]
        marked = {folder for folder, _, name in marks if name in (COMMIT, DAMAGED)}
        return [
            folder
            for folder in self.storage.folders()
            if is_of_a_step(folder) and folder not in marked
        ]

    def _counts(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint counts. A yes is cached: a step is never committed twice."""
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
    folder = storage.sub(name)
    return Checkpoint(folder.uri, folder)


def _set_aside(checkpoint: Checkpoint, why: CheckpointDamaged) -> bool:
    """Replace the commit with a DAMAGED mark. Return False if storage does not allow it.

    The checkpoint is then skipped. What breaks reads often breaks writes too, and must not keep the
    run from using an older checkpoint.
    """
    _log.warning("%s", why)
    try:
        checkpoint.storage.write(DAMAGED, f"{time.time():.0f} {why.message}\n".encode())
        checkpoint.storage.delete(COMMIT)
    except StorageError as error:
        _log.warning("checkpoint %s is skipped, but could not be set aside: %s", checkpoint, error)
        return False
    return True


def _rank_record(save: str, rank: int) -> str:
    return f"{save}-rank-{rank:04d}.json"


def _entry(name: str, content: bytes) -> FileEntry:
    return FileEntry(name=name, bytes=len(content), digest=hashlib.sha256(content).hexdigest())


def _await(storage: Storage, name: str, given_up: Event) -> bytes:
    """Wait for an object that another rank writes, and return its content."""
    end, pause = time.monotonic() + OTHER_RANKS_SECONDS, _POLL_SECONDS[0]
    while True:
        try:
            return storage.read(name)
        except FileNotFoundError:
            pass
        if given_up.wait(pause) or time.monotonic() >= end:
            raise StorageError(
                f"checkpoint {storage.uri} is not committed: {name} was not written",
                remedy="check the log of that rank; the previous checkpoint is used",
            )
        pause = min(2 * pause, _POLL_SECONDS[1])


def checkpoints_of(config: RunConfig) -> str:
    """Return the address of a run's checkpoints: a folder, or s3://bucket/prefix."""
    address = config.recovery.checkpoints
    if address is None:
        return str(Workspace.of(config).checkpoints)
    return f"{address.rstrip('/')}/{config.run_id}"


def open_store(
    config: RunConfig,
    fence: Callable[[], None] = lambda: None,
    lineage: Lineage = Lineage(),  # noqa: B008  immutable
) -> CheckpointStore:
    """Open the store of a run's checkpoints.

    Args:
        fence, lineage: as for `CheckpointStore`.
    """
    training = config.training
    retention = Retention(training.save_total_limit, training.save_keep_every)
    return CheckpointStore(
        checkpoints_of(config), keep=retention, fence=fence, lineage=lineage, run=config.run_id
    )
