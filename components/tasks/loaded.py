"""What a loaded model remembers of its files: their precision, and the weights that they lack."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

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
