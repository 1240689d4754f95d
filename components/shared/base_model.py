"""What model.base stood for when it was used, so that another model in its place is noticed."""

from __future__ import annotations

import json
from pathlib import Path

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import BASE_FILE
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.model_source import content_of


def base_content(config: RunConfig) -> str:
    """As `content_of` of the base model; "" where training begins from scratch.

    Raises:
        BadInput, StorageError: as `content_of`.
    """
    return content_of(config.model.base, config) if config.model.base else ""


def note_base(folder: Path, config: RunConfig) -> None:
    """Writes beside adapters what they are to be added to."""
    content = {"address": config.model.base, "content": base_content(config)}
    (folder / BASE_FILE).write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")


def check_base(folder: Path, config: RunConfig) -> None:
    """Refuses to add adapters to another base model than the one they were trained with.

    Raises:
        BadInput: the base has changed.
        StorageError: it cannot be asked.
    """
    note = folder / BASE_FILE
    if not note.is_file():
        # Exported by a version that wrote none.
        return
    trained, now = json.loads(note.read_text(encoding="utf-8"))["content"], base_content(config)
    if trained != now:
        raise BadInput(
            f"model.base = {config.model.base!r}: its files have changed since the adapters in "
            f"{folder} were trained ({trained} -> {now})",
            remedy="put the files back as they were, or train again under another run name "
            "(run: ...); models:/NAME/VERSION and hub: with model.revision cannot change",
        )
