"""What a process runs with, found out without importing any of it."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

from steadytrain.components.shared.digest import code_digest

_PACKAGES = ("steadytrain", "torch", "transformers", "accelerate", "datasets", "mlflow", "kfp")


@functools.cache
def environment() -> dict[str, str]:
    """Versions by name: Python, the platform, the packages that are installed, this code."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {"code": code_digest()}
