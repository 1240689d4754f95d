"""Save a Transformers model without importing DeepSpeed, and with errors that say why it failed."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from steadytrain.components.shared.errors import SteadytrainError


@contextlib.contextmanager
def never_wrapped() -> Iterator[None]:
    """Speed up `save_pretrained` for a model that no DeepSpeed engine wraps.

    `save_pretrained` makes accelerate look for an engine to unwrap. That imports DeepSpeed, and
    with it MLflow and a web server, wherever they are installed. It accounts for 5 of the 15
    seconds of a short training run (measured on two cores, transformers 5.23, deepspeed 0.19).
    """
    from accelerate.utils import other

    before = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = before


def save_model(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Save a Transformers model, or adapters, with weights of this precision.

    The model itself stays as it is. Weights that Transformers keeps in 32 bits stay so too.
    """
    if dtype == torch.float32:
        model.save_pretrained(folder, safe_serialization=True)
        return
    kept = [
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    cast: dict[object, torch.Tensor] = {}

    def stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or any(part in name for part in kept):
            return tensor
        # Tied weights stay one tensor.
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in cast:
            cast[place] = tensor.to(dtype)
        return cast[place]

    weights = {name: stored(name, item) for name, item in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights, safe_serialization=True)
    path = folder / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        for section in (config, *(item for item in config.values() if isinstance(item, dict))):
            if section.get("dtype") == "float32":
                section["dtype"] = str(dtype).removeprefix("torch.")
        path.write_text(f"{json.dumps(config, indent=2, sort_keys=True)}\n", encoding="utf-8")


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Raise OSError where safetensors and tokenizers raise errors of their own.

    They are written in Rust, which puts the number of a system error, such as a full disk, into
    the text.
    """
    try:
        yield
    except SteadytrainError:
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code)) from error
