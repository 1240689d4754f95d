"""The files that a model was loaded from: their precision, and weights that do not match."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from steadytrain.components.shared.errors import BadInput

# Check that a base model's files match the model: no weight is missing and none is left over.
#
# Transformers initializes missing weights at random and drops extra ones, both without an error.

_NO_WEIGHTS = (".masked_bias", ".inv_freq", ".position_ids")
"""Buffers that older versions of Transformers also saved."""


def check_complete(
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
    if "pooler" in name or in_inner_head(model, name):
        return False
    first = name.partition(".")[0]
    return first == model.base_model_prefix or first in {
        child for child, _ in model.base_model.named_children()
    }


def inner_heads(model: Any) -> tuple[str, ...]:
    """Return the heads that are inside of the base model, as those of timm's models are."""
    inner = getattr(model, "timm_model", None)
    names = inner.pretrained_cfg.get("classifier") if inner is not None else ()
    listed = (names,) if isinstance(names, str) else tuple(names or ())
    return tuple(f"{model.base_model_prefix}.{name}" for name in listed)


def in_inner_head(model: Any, name: str) -> bool:
    """Return whether a weight or module belongs to one of these heads."""
    return any(f"{name}.".startswith(f"{head}.") for head in inner_heads(model))


_NEW, _RESIZED, _DTYPE = "_steadytrain_new", "_steadytrain_resized", "_steadytrain_dtype"
_STORED: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Names of precisions in the header of a safetensors file."""


def note_new_weights(model: Any, absent: Iterable[str], resized: Iterable[str]) -> None:
    """Remember which weights are not from a file, so that they start from random values.

    Args:
        absent: weights that no file has.
        resized: weights that have another shape in the files.
    """
    setattr(model, _RESIZED, tuple(resized))
    setattr(model, _NEW, (*absent, *resized_weights(model)))


def new_weights(model: Any) -> Sequence[str]:
    """Return the weights that are not from a file."""
    found: Sequence[str] = getattr(model, _NEW, ())
    return found


def resized_weights(model: Any) -> Sequence[str]:
    """Return those of them that have another shape in the files, such as another number of rows."""
    found: Sequence[str] = getattr(model, _RESIZED, ())
    return found


def new_modules(model: Any) -> list[str]:
    """Return the modules whose weights are not from a file, such as a new pooler."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in new_weights(model)))


def note_dtype(model: Any, folder: Path) -> None:
    """Remember the precision that most of the values in a folder's files have."""
    setattr(model, _DTYPE, _stored_dtype(folder))


def dtype_of_files(model: Any) -> torch.dtype:
    """Return the precision of the files that a model is from; float32 if it is from none."""
    found: torch.dtype = getattr(model, _DTYPE, torch.float32)
    return found


def _stored_dtype(folder: Path) -> torch.dtype:
    sizes = Counter[torch.dtype]()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        for name, tensor in header.items():
            if name != "__metadata__" and tensor["dtype"] in _STORED:
                start, end = tensor["data_offsets"]
                sizes[_STORED[tensor["dtype"]]] += end - start
    if sizes:
        return sizes.most_common(1)[0][0]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = f"torch.{config.get('dtype') or config.get('torch_dtype')}"
    return next((found for found in _STORED.values() if str(found) == named), torch.float32)
