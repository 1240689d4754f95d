"""The step: from the addresses of a data set to checked, split and packed data."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from steadytrain.components.preprocess.build import build
from steadytrain.components.preprocess.inputs import Inputs, find_inputs
from steadytrain.components.preprocess.model import Model, find_model
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import DATA_CODE
from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.reuse import ReuseStore, step_key
from steadytrain.components.shared.stage import Stage, stage
from steadytrain.components.shared.storage.local import copy_file, sync_folder
from steadytrain.components.shared.workspace import Workspace

STEP = "preprocess"
TASKS = ("causal_lm", "supervised_finetuning", "sequence_classification")


def run(config: RunConfig) -> DataRecord:
    """Prepares the data of a run, or finds them prepared.

    Raises:
        BadInput: an address, the model or the task cannot be used.
        DataError: the data cannot be used; what was quarantined is kept and named.
        StorageError: the prepared data cannot be written.
    """
    with stage(config, STEP) as current:
        record = _prepare(config, current)
        record.save(current.workspace.record(STEP))
        current.summary = _summary(record)
        return record


def _prepare(config: RunConfig, current: Stage) -> DataRecord:
    if config.data.task not in TASKS:
        raise BadInput(
            f"data.task = {config.data.task!r}: preprocessing knows {', '.join(TASKS)}",
            remedy="data of a task of your own come prepared: write its DataRecord to "
            f"{current.workspace.record(STEP)} and start at the training step",
        )
    model, inputs = find_model(config), find_inputs(config.data)
    store = ReuseStore(current.workspace, STEP, DataRecord)
    digest = inputs.digest()
    key = _key(config, model, digest)
    found = store.find(key, ttl_seconds=config.recovery.reuse_ttl_seconds)
    if found is not None:
        current.reused = True
        return found
    record = _build(config, model, inputs, current)
    record = record.model_copy(update={"inputs_digest": digest})
    folder = current.workspace.data(record.fingerprint)
    store.remember(key, record, sorted(path for path in folder.rglob("*") if path.is_file()))
    return record


def _key(config: RunConfig, model: Model, inputs_digest: str) -> str:
    return step_key(
        inputs_digest,
        config.data.model_dump(mode="json", exclude={"source"}),
        model.tokenizer_digest() or config.model.vocab_size,
        rooms=DATA_CODE,
    )


def _build(config: RunConfig, model: Model, inputs: Inputs, current: Stage) -> DataRecord:
    """Builds beside the final place and moves the result there when it is whole."""
    workspace = current.workspace
    scratch = workspace.unfinished_data
    workspace.quarantine.unlink(missing_ok=True)
    with _cleared(workspace):
        try:
            record = build(config, model, inputs, scratch, current)
        except DataError as error:
            quarantine = scratch / "data" / "quarantine.jsonl"
            if quarantine.is_file() and quarantine.stat().st_size:
                copy_file(quarantine, workspace.quarantine)
                error.remedy += f"; the quarantine file is {workspace.quarantine}"
            raise
        target = workspace.data(record.fingerprint)
        if target.exists():
            # Equal content, but damaged or too old to be relied on.
            target.rename(scratch / "replaced")
        (scratch / "data").rename(target)
        sync_folder(target.parent)
        return record.model_copy(update={"folder": str(target)})


@contextlib.contextmanager
def _cleared(workspace: Workspace) -> Iterator[None]:
    """An empty folder for unfinished data that is gone afterwards, however it ends."""
    folder = workspace.unfinished_data
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write the prepared data in {folder.parent}: {error.strerror or error}",
            remedy="free space there (about three times the size of the data), or set "
            "another output, then start the run again",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _summary(record: DataRecord) -> str:
    sides = (
        f"{side} {record.sides[side].documents} records" for side in ("train", "validation", "test")
    )
    return f"{', '.join(sides)}; {record.sides['train'].tokens} training tokens"
