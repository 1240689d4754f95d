"""Errors of other libraries: recognize system errors, and that memory ran out, without torch.

The kernel's OOM killer leaves no error to recognize: the process is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from typing import Final

from steadytrain.components.shared.errors import BadInput, SteadytrainError, Stopped

DEVICE_TEXTS: Final = (
    r"(?:CUDA|HIP|XPU|MPS)(?: error:| backend)? out of memory|OutOfMemoryError"
    r"|C(?:UBLAS|USOLVER|UDNN)_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_HOST_ALLOCATION_FAILED)"
    # Creating a handle allocates memory, and running out of it is the most common cause.
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
    r"|DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    r"|Cuda failure \d* ?'out of memory'"
)
"""What torch and CUDA say when an allocation fails. torch's CPU allocator is among them."""
NOT_MAPPED: Final = "failed to map segment from shared object"
"""What the loader of libraries says where `ulimit -v` is too low."""
_TEXTS = re.compile(DEVICE_TEXTS)


class OutOfMemory(SteadytrainError):
    """Memory ran out, and there is nothing smaller to try."""


def ran_out(error: BaseException) -> bool:
    """Return whether an error says that memory ran out."""
    if isinstance(error, OutOfMemory | MemoryError):
        return True
    # By its text, which starts with the name of the type.
    return isinstance(error, Exception) and bool(_TEXTS.search(f"{type(error).__name__}: {error}"))


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
        cause = error.__cause__ if kind.startswith("StrictDataclass") else None
        reason = f"{kind}: {cause or error}"
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
