"""Turn any error that a library raises about someone else's model files into bad input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from steadytrain.components.shared.errors import BadInput, SteadytrainError

_PANIC = "PanicException"
"""From tokenizers and safetensors, which are written in Rust. It is not an Exception, and each
library has its own."""
_OUT_OF_MEMORY = "OutOfMemoryError"
"""From torch, compared by name to avoid importing torch."""
_LONGEST = 500


@contextlib.contextmanager
def foreign(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever is raised about a model's files into BadInput.

    If a field has a wrong type or value, Transformers raises whatever happens to fail: TypeError,
    ZeroDivisionError, AssertionError, ImportError. Out-of-memory errors, requests to stop, and
    steadytrain's own errors pass through unchanged.

    Args:
        what: the field, the file and what cannot be done with it: "model.base: x/config.json cannot
            be read".
        remedy: the fix.

    Raises:
        BadInput: the message is `what` and the reason.
    """
    try:
        yield
    except (SteadytrainError, MemoryError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        if kind == _OUT_OF_MEMORY or not (isinstance(error, Exception) or kind == _PANIC):
            raise
        # Transformers' configurations name the field in the cause.
        said = error.__cause__ if kind.startswith("StrictDataclass") else None
        reason = f"{kind}: {said or error}"
        raise BadInput(f"{what}: {reason[:_LONGEST]}", remedy=remedy) from error
