"""Files of a model that somebody else made: whatever a library raises over them is bad input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from steadytrain.components.shared.errors import BadInput, SteadytrainError

_PANIC = "PanicException"
"""Of tokenizers and safetensors, which are Rust; no Exception, and of a module of its own."""
_OUT_OF_MEMORY = "OutOfMemoryError"
"""Torch's, which is not imported for its sake."""
_LONGEST = 500


@contextlib.contextmanager
def foreign(what: str, remedy: str) -> Iterator[None]:
    """Turns what is raised over a model's files into one error.

    What Transformers raises over a field of a wrong type or value is whatever happens to fail:
    TypeError, ZeroDivisionError, AssertionError, ImportError. A lack of memory, a request to stop
    and errors of the product's own pass.

    Args:
        what: field, file and what cannot be done with it: "model.base: x/config.json cannot be
            read".

    Raises:
        BadInput: the message is `what` with the reason.
    """
    try:
        yield
    except (SteadytrainError, MemoryError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        if kind == _OUT_OF_MEMORY or not (isinstance(error, Exception) or kind == _PANIC):
            raise
        # The configurations of Transformers name the field in the cause.
        said = error.__cause__ if kind.startswith("StrictDataclass") else None
        reason = f"{kind}: {said or error}"
        raise BadInput(f"{what}: {reason[:_LONGEST]}", remedy=remedy) from error
