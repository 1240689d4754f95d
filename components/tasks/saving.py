"""Saving a model of Transformers without DeepSpeed's import."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def never_wrapped() -> Iterator[None]:
    """For `save_pretrained` of a model that no DeepSpeed engine wraps.

    It has accelerate look for an engine to unwrap, which imports DeepSpeed, and with that
    MLflow and a web server, wherever they are installed: 5 s of 15 that a short training
    needs (measured on two cores, transformers 5.23, deepspeed 0.19).
    """
    from accelerate.utils import other

    before = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = before
