"""Import KFP without its server clients, for our programs that compile or run a pipeline."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Final

_VARIABLE: Final = "_KFP_RUNTIME"


def import_kfp() -> None:
    """Import `kfp` such that later imports from it load no client for servers.

    This halves the import time. `kfp.Client` then does not exist in this process, so do not call
    this in code that other programs import.
    """
    if "kfp" in sys.modules or _VARIABLE in os.environ:
        return
    # KFP sets this variable for its own steps, which need neither clients nor a compiler.
    os.environ[_VARIABLE] = "true"
    try:
        import_module("kfp")
    finally:
        del os.environ[_VARIABLE]
