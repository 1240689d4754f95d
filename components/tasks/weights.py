"""Check that a base model's files match the model: no weight is missing and none is left over.

Transformers initializes missing weights at random and drops extra ones, both without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from steadytrain.components.shared.errors import BadInput

_NO_WEIGHTS = (".masked_bias", ".inv_freq", ".position_ids")
"""Buffers that older versions of Transformers also saved."""


def check_whole(
    model: Any, report: Mapping[str, Any], folder: Path, *, new_head: bool, field: str
) -> None:
    """Check the loading report from Transformers.

    Args:
        report: the loading info of `from_pretrained`.
        new_head: the head is newly initialized, so only the weights below it must match.
        field: names the folder in errors.

    Raises:
        BadInput: weights are missing, have a different shape, or are left over.
    """
    missing = [name for name in report["missing_keys"] if not new_head or _is_inner(model, name)]
    place = f"{field}: {folder}"
    _refuse(place, "lacks {} of the model", missing, "give the folder of the complete model")
    remedy = "restore the config.json that belongs to the weights"
    shapes = [name for name, *_ in report["mismatched_keys"] if _is_inner(model, name)]
    _refuse(place, "contains {} whose shape differs from its config.json", shapes, remedy)
    buffers = {name for name, _ in model.named_buffers()}
    left = [
        name
        for name in report["unexpected_keys"]
        if _is_inner(model, name)
        and not name.endswith(_NO_WEIGHTS)
        and not buffers & {name, f"{model.base_model_prefix}.{name}"}
    ]
    _refuse(place, "contains {} that its config.json does not define", left, remedy)


def _refuse(place: str, what: str, names: Iterable[str], remedy: str) -> None:
    found = sorted(names)
    if found:
        count = f"{len(found)} weight{'s' if len(found) > 1 else ''}"
        raise BadInput(f"{place} {what.format(count)}, such as {found[0]}", remedy=remedy)


def _is_inner(model: Any, name: str) -> bool:
    """Return whether a weight belongs to the base model, whose prefix a file may omit.

    The pooler does not: it is initialized for the head.
    """
    if "pooler" in name:
        return False
    first = name.partition(".")[0]
    return first == model.base_model_prefix or first in {
        child for child, _ in model.base_model.named_children()
    }
