"""The preprocess step: turn the addresses of a data set into checked, split and packed data."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.components.preprocess.build import build
from steadytrain.components.preprocess.folds import holding_out
from steadytrain.components.preprocess.inputs import OWN_OUTPUT, Inputs, inputs_of
from steadytrain.components.preprocess.model import Model, find_model, with_template
from steadytrain.components.preprocess.prepared import mark_used, publish, scratch
from steadytrain.components.shared.config import RunConfig, from_parameters
from steadytrain.components.shared.config.data_fields import is_template
from steadytrain.components.shared.config.document import shortened
from steadytrain.components.shared.digest import DATA_CODE
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import DataError, StorageError
from steadytrain.components.shared.events.types import DataPrepared, Warned
from steadytrain.components.shared.kubeflow.connection import run_tags
from steadytrain.components.shared.left_out import in_one_line, much_left_out
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.stage import ReuseStore, Stage, stage, step_key
from steadytrain.components.shared.storage.local import copy_file, room_for
from steadytrain.components.shared.tracking import run_links
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tasks.base import open_encoder, task_code
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.base import Encoder
from steadytrain.components.train.recovery.takeover import begin_run

if TYPE_CHECKING:
    from kfp import dsl

STEP = "preprocess"


def run(config: RunConfig) -> DataRecord:
    """Prepare the data of a run, or reuse data that is already prepared.

    Raises:
        BadInput: an address, the model or the task cannot be used.
        DataError: the data cannot be used. The error names the quarantine file, which is kept.
        StorageError: the prepared data cannot be written.
    """
    with stage(config, STEP) as current:
        while True:
            record = holding_out(_prepare(config, current), config.cross_validation)
            mark_used(Path(record.folder))
            record.save(current.workspace.record(STEP))
            # `gc` moves a folder aside before it looks for records that name it. So one of the two
            # always notices the other: either the folder is still here, or it comes back.
            if Path(record.folder).is_dir():
                break
        card = json.loads(record.path("card.json").read_text(encoding="utf-8"))
        counts, threshold = card["duplicates"], card["near_duplicate_threshold"]
        current.emit(
            DataPrepared(
                records=card["records"], duplicates=counts, near_duplicate_threshold=threshold
            )
        )
        much = much_left_out(counts, threshold, card["records"])
        if much:
            listed = record.path("quarantine.jsonl")
            current.emit(Warned(stage=current.name, message=f"{much}; {listed} lists them"))
        for noticed in card["warnings"] if current.reused else ():
            current.emit(Warned(stage=current.name, message=noticed))
        if endless := _endless_turns(config, record):
            current.emit(Warned(stage=current.name, message=endless))
        current.summary = in_one_line(record, card)
        return record


def _endless_turns(config: RunConfig, record: DataRecord) -> str:
    """Return what is wrong with a chat template that ends no turn of the assistant, or ""."""
    settings = open_encoder(config.data).tokenizer
    if record.turn_ends or settings is None or not settings.chat_template:
        return ""
    model = config.model
    turns = {
        "data.chat_template": config.data.chat_template,
        "model.tokenizer": model.tokenizer,
        "model.base": model.base,
    }
    field, value = next((field, value) for field, value in turns.items() if value)
    shown = shortened(value) if is_template(value) else value
    return (
        f"in the chat template of {field} = {shown!r}, no end token directly follows what the "
        "assistant says, so the model does not learn to stop: use a template that ends each turn "
        "with one, such as the tokenizer's eos_token (data.chat_template)"
    )


def _prepare(config: RunConfig, current: Stage) -> DataRecord:
    check_task(config)
    config = with_template(config)
    encoder = open_encoder(config.data)
    model = find_model(config) if encoder.tokenizer else None
    inputs = inputs_of(config)
    store = ReuseStore(current.workspace, STEP, DataRecord)
    digest = inputs.digest()
    key = _key(config, model, inputs, digest)
    result = store.find(key, ttl_seconds=config.recovery.reuse_ttl_seconds)
    if result is not None:
        config.training.class_weights.check_labels(result.labels)
        current.reuse(store.origin(key))
        return result
    record = _build(config, encoder, model, inputs, current)
    record = record.model_copy(update={"inputs_digest": digest})
    files = (path for path in Path(record.folder).rglob("*") if path.is_file())
    store.remember(key, record, sorted(files))
    return record


def _key(config: RunConfig, model: Model | None, inputs: Inputs, digest: str) -> str:
    return step_key(
        digest,
        config.counted(Use.DATA),
        (model.tokenizer_digest() or config.model.vocab_size) if model else "",
        # The files in the output folder change with every run.
        {kind: count for kind, count in inputs.left_out.items() if kind != OWN_OUTPUT},
        task_code(config.data.task),
        config.training.augmentation.on,
        code=DATA_CODE,
    )


def _build(
    config: RunConfig, encoder: Encoder, model: Model | None, inputs: Inputs, current: Stage
) -> DataRecord:
    """Build the data in a scratch folder, and publish it when it is complete."""
    workspace = current.workspace
    workspace.quarantine.unlink(missing_ok=True)
    with _writing(workspace), scratch(workspace.prepared, workspace.run_id) as folder:
        try:
            record = build(config, encoder, model, inputs, folder, current)
        except DataError as error:
            quarantine = folder / "data" / "quarantine.jsonl"
            if quarantine.is_file() and quarantine.stat().st_size:
                copy_file(quarantine, workspace.quarantine)
                error.remedy += f"; the quarantine file is {workspace.quarantine}"
            raise
        target = publish(folder / "data", workspace.prepared, record.fingerprint)
        return record.model_copy(update={"folder": str(target)})


@contextlib.contextmanager
def _writing(workspace: Workspace) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write the prepared data in {workspace.prepared}: {error.strerror or error}",
            remedy=f"{room_for(error)} (it takes about three times the size of the data), or set "
            "another output, then start the run again",
        ) from error


def kfp_preprocess(
    *,
    resolved: dsl.Artifact,
    data: dsl.Dataset,
    data_card: dsl.HTML,
    counts: dsl.Metrics,
    **parameters: Any,
) -> None:
    """Run the step. Small artifacts describe the result, which stays in the workspace."""
    config = from_parameters(**parameters)
    workspace = begin_run(config, run_tags(str(parameters["job"])))
    shutil.copyfile(workspace.config, resolved.path)
    resolved.metadata.update(
        run=config.run_id, digest=config.digest(), **run_links(config, workspace)
    )

    record = run(config)
    shutil.copyfile(workspace.record("preprocess"), data.path)
    shutil.copyfile(record.path("card.html"), data_card.path)
    data.metadata.update(fingerprint=record.fingerprint, folder=record.folder)
    for side, content in record.sides.items():
        counts.log_metric(f"{side}_documents", content.documents)
        counts.log_metric(f"{side}_sequences", content.rows)
        counts.log_metric(f"{side}_tokens", content.tokens)
