"""The title of a process, as `ps` and `top` show it in place of its command line."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module


def set_title(title: str) -> None:
    """Show this process as "steadytrain: TITLE", cut to the length of its command line."""
    # The library would use the space of the environment too, by which processes are found.
    os.environ["SPT_NOENV"] = "1"
    # It only helps who reads the list: an older environment without the library works.
    with contextlib.suppress(ModuleNotFoundError):
        import_module("setproctitle").setproctitle(f"steadytrain: {title}")
