"""Record the content of model.base when it is used, to detect if the model changes later."""

from __future__ import annotations

import json
from pathlib import Path

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import BASE_FILE
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.model_source import content_of


def base_content(config: RunConfig) -> str:
    """Return `content_of` for the base model; "" if training starts from scratch.

    Raises:
        BadInput, StorageError: the same as `content_of`.
    """
    return content_of(config.model.base, config) if config.model.base else ""


def teacher_content(config: RunConfig) -> str:
    """Return `content_of` for the teacher; "" if there is none.

    Raises:
        BadInput, StorageError: the same as `content_of`.
    """
    teacher = config.training.distillation.teacher
    return content_of(teacher, config) if teacher else ""


def grader_content(config: RunConfig) -> str:
    """Return `content_of` for the reference model of a curriculum; "" if there is none.

    Raises:
        BadInput, StorageError: the same as `content_of`.
    """
    model = config.training.curriculum.model
    return content_of(model, config) if model else ""


def note_base(folder: Path, config: RunConfig) -> None:
    """Write a note beside adapters that identifies their base model."""
    content = {"address": config.model.base, "content": base_content(config)}
    (folder / BASE_FILE).write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")


def name_base(folder: Path, config: RunConfig) -> None:
    """Make adapters name a base model on the hub by its name, not by a folder of this machine."""
    base, path = config.model.base or "", folder / "adapter_config.json"
    if not base.startswith("hub:"):
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    content["base_model_name_or_path"] = base.removeprefix("hub:")
    content["revision"] = base_content(config).removeprefix("commit ")
    path.write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")


def check_base(folder: Path, config: RunConfig) -> None:
    """Refuse to add adapters to a base model other than the one they were trained with.

    Raises:
        BadInput: if the base has changed.
        StorageError: if the base cannot be checked.
    """
    note = folder / BASE_FILE
    if not note.is_file():
        # Exported by a version that did not write this file.
        return
    trained, now = json.loads(note.read_text(encoding="utf-8"))["content"], base_content(config)
    if trained != now:
        raise BadInput(
            f"model.base = {config.model.base!r}: its files have changed since the adapters in "
            f"{folder} were trained ({trained} -> {now})",
            remedy="put the files back as they were, or train again under another run name "
            "(run: ...); models:/NAME/VERSION and hub: with model.revision cannot change",
        )
