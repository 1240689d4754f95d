"""The layer of a Transformers classifier that returns its logits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from steadytrain.components.shared.class_names import folded, have_parts, indices_of, listed, named
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.loaded_weights import new_weights, resized_weights


def class_head(model: Any) -> tuple[str, torch.nn.Linear]:
    """Return the name and the layer.

    Raises:
        BadInput: the model has no such layer outside of its encoder or decoder.
    """
    inner = f"{model.base_model_prefix}."
    found = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear
        and layer.out_features == model.config.num_labels
        and not name.startswith(inner)
    ]
    if not found:
        raise BadInput(
            f"{type(model).__name__} has no linear layer for its {model.config.num_labels} labels",
            remedy="use a classifier of Transformers with a linear head",
        )
    return found[-1]


def class_names(folder: Path) -> list[str]:
    """Return the classes that a model's config.json names, in the order of its logits."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = content.get("id2label")
    if isinstance(found, Mapping):
        return [str(found[key]) for key in sorted(found, key=int)]
    # Transformers' own names, which it does not write for two classes.
    return [f"LABEL_{index}" for index in range(content.get("num_labels") or 2)]


def fit_head(model: Any, names: Sequence[str], labels: Sequence[str]) -> str:
    """Make the head of a base model one for the labels of the data.

    Its rows move with the names of their classes. If only some classes are the same, the head gets
    new weights. If none are, the names may be two names for one thing, so the rows stay.

    Args:
        names: the base model's classes, in the order of the rows.

    Returns:
        A sentence about what happened; "" if nothing did, or if the base model has no head.

    Raises:
        BadInput: the rows would have to move, and the model has no linear head.
    """
    of_base, of_data = listed(names), listed(labels)
    if _is_outside(model, resized_weights(model)):
        return (
            f"the head is new, because model.base has {len(names)} classes ({of_base}) and the "
            f"data {len(labels)} ({of_data})"
        )
    if has_new_head(model) or list(names) == list(labels):
        return ""
    places = indices_of(labels, names)
    if places == sorted(range(len(labels))):
        return ""
    if places is not None:
        _move_rows(model, places, "model.base", names, labels)
        return (
            f"the classes of model.base are {of_base}; the rows of its head are now in the order "
            f"of the data: {of_data}"
        )
    parts = have_parts(names) or have_parts(labels)
    shared = {*map(folded, names)} & {*map(folded, labels)}
    if parts or shared or len(names) != len(labels):
        renew_head(model)
        return f"the head is new: the classes of model.base are {of_base}, and the data's {of_data}"
    why = "has other names for its classes" if named(names) else "does not name its classes"
    pairs = [f"{name} = {label}" for name, label in zip(names, labels, strict=True)]
    return (
        f"model.base {why}, so its head is used in its order: {listed(pairs)}; if that is wrong, "
        "set data.labels in the order of model.base"
    )


def order_rows(model: Any, labels: Sequence[str], field: str) -> None:
    """Put the head of a classifier that only answers in the order of the labels, if it has these.

    Args:
        field: names the model in errors.

    Raises:
        BadInput: the model has no linear head.
    """
    names = [str(model.config.id2label.get(index)) for index in range(model.config.num_labels)]
    places = indices_of(labels, names)
    if places is None:
        return
    if places != sorted(places):
        _move_rows(model, places, field, names, labels)
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: index for index, label in enumerate(labels)}


def has_new_head(model: Any) -> bool:
    """Return whether some of the head's weights are not from a file."""
    return _is_outside(model, new_weights(model))


def renew_head(model: Any) -> None:
    """Draw new weights for the head, as Transformers does for a model without one."""
    _, head = class_head(model)
    torch.nn.init.normal_(head.weight, std=getattr(model.config, "initializer_range", 0.02))
    if head.bias is not None:
        torch.nn.init.zeros_(head.bias)


def _move_rows(
    model: Any, places: Sequence[int], field: str, names: Sequence[str], labels: Sequence[str]
) -> None:
    try:
        _, head = class_head(model)
    except BadInput as error:
        raise BadInput(
            f"{field}: its labels are {', '.join(names)}, the data's are {', '.join(labels)}, and "
            f"their order cannot be changed: {error.message}",
            remedy="name the labels in the model's order in data.labels",
        ) from error
    with torch.no_grad():
        for rows in head.parameters():
            rows.copy_(rows[list(places)])


def _is_outside(model: Any, names: Sequence[str]) -> bool:
    """Return whether one of the weights belongs to the head, outside of encoder or decoder."""
    return not all(name.startswith(f"{model.base_model_prefix}.") for name in names)
