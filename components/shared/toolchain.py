"""What compiles kernels when they are first used: a C++ compiler, ninja, Python's headers.

As a program, it prints what is missing here.

Triton compiles a launcher in C for each kernel on a GPU, torch.compile writes C++ on a CPU, and
DeepSpeed builds its own operators.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_COMPILERS: Final = ("CXX", ("g++", "clang++")), ("CC", ("gcc", "clang", "cc"))
_LIBAIO: Final = "#include <libaio.h>\nint main() { return io_destroy(0); }\n"
_SECONDS: Final = 60.0
REMEDY: Final = "install g++, ninja and Python's headers (Debian: g++, ninja-build, python3-dev)"
DISK_REMEDY: Final = (
    "install g++, ninja, Python's headers and libaio's (Debian: g++, ninja-build, python3-dev, "
    "libaio-dev), or use compute.offload: all, which takes host memory instead"
)


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


def missing_for_disk() -> list[str]:
    """Return what DeepSpeed's `async_io`, which reads and writes files, lacks on this machine.

    It tries libaio with a small program, and with CFLAGS and LDFLAGS as DeepSpeed does.
    """
    missing = missing_tools()
    compiler = next(filter(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")), None)
    if compiler is None:
        return missing
    flags = {name: os.environ.get(name, "").split() for name in ("CFLAGS", "LDFLAGS")}
    command = [compiler, *flags["CFLAGS"], "-x", "c++", "-", "-o", os.devnull]
    done = subprocess.run(
        [*command, *flags["LDFLAGS"], "-laio"],
        input=_LIBAIO,
        text=True,
        capture_output=True,
        timeout=_SECONDS,
    )
    return missing if done.returncode == 0 else [*missing, "libaio"]


if __name__ == "__main__":
    print(", ".join(missing_tools()))
