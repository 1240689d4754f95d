"""Recognize that memory ran out while the process lives on, without importing torch.

The kernel's OOM killer leaves no error to recognize: the process is gone.
"""

from __future__ import annotations

import re
from typing import Final

from steadytrain.components.shared.errors import SteadytrainError

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
