"""What a process runs on: Python, the system, and the packages that decide about results."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Final

_PACKAGES: Final = (
    "steadytrain", "torch", "transformers", "tokenizers", "accelerate", "peft", "bitsandbytes",
    "deepspeed", "liger-kernel", "numpy", "scikit-learn",
)  # fmt: skip


@functools.cache
def environment() -> dict[str, str]:
    """Return the versions by name. A package that is not installed is left out."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
