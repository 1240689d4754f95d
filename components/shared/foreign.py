"""Turn any error that someone else's files or code raise into bad input."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from steadytrain.components.shared.errors import BadInput, SteadytrainError, Stopped
from steadytrain.components.shared.out_of_memory import ran_out

_PANIC = "PanicException"
"""From tokenizers and safetensors, which are written in Rust. It is not an Exception, and each
library has its own."""
_LONGEST = 500


@contextlib.contextmanager
def foreign(what: str, remedy: str, *, runs_code: bool = False) -> Iterator[None]:
    """Turn whatever is raised about a model's files, or by a plugin, into BadInput.

    If a field has a wrong type or value, Transformers raises whatever happens to fail: TypeError,
    ZeroDivisionError, AssertionError, ImportError. A plugin may call sys.exit. Out-of-memory
    errors, requests to stop, and steadytrain's own errors pass through unchanged.

    Args:
        what: the field, the file and what cannot be done with it: "model.base: x/config.json cannot
            be read".
        remedy: the fix.
        runs_code: whether this imports or calls a plugin, which may raise anything.

    Raises:
        BadInput: the message is `what` and the reason.
    """
    try:
        yield
    except (SteadytrainError, Stopped):
        raise
    except BaseException as error:
        kind = type(error).__name__
        theirs = isinstance(error, Exception | SystemExit) or kind == _PANIC
        theirs = theirs or (runs_code and raised_by_code(error))
        if ran_out(error) or not theirs:
            raise
        # Transformers' configurations name the field in the cause.
        said = error.__cause__ if kind.startswith("StrictDataclass") else None
        reason = f"{kind}: {said or error}"
        raise BadInput(f"{what}: {reason[:_LONGEST]}", remedy=remedy) from error


def raised_by_code(error: BaseException) -> bool:
    """Return whether a plugin raised this, and not somebody who stops this process.

    Where stop signals are taken (`stopping.stoppable`), they raise Stopped. So a KeyboardInterrupt
    is the user's only while Python's own handler is in place.
    """
    if isinstance(error, SteadytrainError | Stopped | GeneratorExit):
        return False
    interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not (isinstance(error, KeyboardInterrupt) and interrupt)
