"""What compiles kernels when they are first used: a C++ compiler, ninja, Python's headers.

As a program, it prints what is missing here.

Triton compiles a launcher in C for each kernel on a GPU, torch.compile writes C++ on a CPU, and
DeepSpeed builds its own operators.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_COMPILERS: Final = ("CXX", ("g++", "clang++")), ("CC", ("gcc", "clang", "cc"))
REMEDY: Final = "install g++, ninja and Python's headers (Debian: g++, ninja-build, python3-dev)"


def missing_tools() -> list[str]:
    """Return what is missing on this machine, in words; empty if kernels can be compiled."""
    missing = []
    for variable, names in _COMPILERS:
        chosen = os.environ.get(variable, "").split()
        if not any(shutil.which(name) for name in (chosen[:1] or names)):
            missing.append(f"{variable}={chosen[0]}" if chosen else names[0])
    if shutil.which("ninja") is None and find_spec("ninja") is None:
        missing.append("ninja")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python.h")
    return missing


if __name__ == "__main__":
    print(", ".join(missing_tools()))
