"""Get the classifier of one part from a model of several data sets."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from steadytrain.components.shared.class_names import have_parts, in_part, part_indices
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.storage.local import follow_umask, room_for
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.loaded_weights import check_whole
from steadytrain.components.tasks.packaging import ADAPTERS, never_wrapped, system_errors
from steadytrain.components.tasks.text import class_head


def extract_part(source: Path, part: str, target: Path) -> list[str]:
    """Write the classifier of a part, with the encoder and the tokenizer, as a plain folder.

    Args:
        source: an exported model of several data sets.
        target: the folder, which must not exist or be empty. A link is followed.

    Returns:
        The classes of the part, without its name.

    Raises:
        BadInput: the model is damaged or has no such part, or the target cannot be written.
    """
    from transformers import AutoModelForSequenceClassification as Auto

    if (source / ADAPTERS).is_file():
        raise BadInput(
            f"{source} has adapters without their base model",
            remedy="register the run, which merges them, and extract the part from "
            "models:/NAME@ALIAS",
        )
    if _followed(target).is_relative_to(_followed(source)):
        raise BadInput(
            f"{target} is in the model's own folder, {source}",
            remedy="give a folder outside of it",
        )
    with foreign(f"{source} cannot be loaded", "give the exported model of a multi_task run"):
        model: Any
        model, report = Auto.from_pretrained(
            source, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        tokenizer = load_tokenizer(source)
    check_whole(model, report, source, new_head=False, field="the model")
    labels = [model.config.id2label[index] for index in range(model.config.num_labels)]
    rows = [index for index, label in enumerate(labels) if in_part(label, part)]
    if not rows:
        raise BadInput(
            f"{source} has no part {part!r}",
            remedy=f"one of {', '.join(part_indices(labels)[0])}"
            if have_parts(labels)
            else "give a model of data.task multi_task; the classes of this one have no parts",
        )
    own = [labels[index].partition("/")[2] for index in rows]
    _keep(model, rows)
    model.config.id2label = dict(enumerate(own))
    model.config.label2id = {label: index for index, label in enumerate(own)}
    _write(model, tokenizer, _followed(target))
    return own


def _followed(path: Path) -> Path:
    """Return where links lead. `Path.resolve` fails if a link leads to itself."""
    return Path(os.path.realpath(path))


def _keep(model: Any, rows: list[int]) -> None:
    """Keep only some rows of the head."""
    name, head = class_head(model)
    fewer = torch.nn.Linear(
        head.in_features, len(rows), bias=head.bias is not None, dtype=head.weight.dtype
    )
    with torch.no_grad():
        for own, all_rows in zip(fewer.parameters(), head.parameters(), strict=True):
            own.copy_(all_rows[rows])
    model.set_submodule(name, fewer)


def _write(model: Any, tokenizer: Any, target: Path) -> None:
    unfinished = target.parent / f".partial-{target.name}"
    try:
        if target.exists() and any(target.iterdir()):
            raise BadInput(f"{target} is not empty", remedy="give a folder that does not exist")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with never_wrapped(), system_errors():
            model.save_pretrained(unfinished, safe_serialization=True)
            tokenizer.save_pretrained(unfinished)
        follow_umask(unfinished)
        unfinished.replace(target)
    except OSError as error:
        raise BadInput(
            f"{target} cannot be written: {error.strerror or error}",
            remedy=f"give another folder, or {room_for(error)}",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
