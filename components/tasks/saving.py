"""Save a Transformers model without importing DeepSpeed, and with errors that say why it failed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

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
