"""What holds for all tests."""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import logging
import signal

import pytest
import typer.testing
from _pytest.logging import catching_logs

from support.selection import check_markers, may_have, required

# Where the tests run in the background, a shell has SIGINT ignored, and the processes that they
# start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()

# Typer builds the whole program again for each call, which takes longer than most calls.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# A worker of xdist runs in a "<string>". `inspect.stack`, which KFP calls for each limit of a step,
# would look for its file in all modules each time: for a pipeline, half a second.
inspect.modulesbyfile["<string>"] = "__main__"


def _attach_to_root(catching):
    """Attach a handler to the root logger alone.

    Pytest attaches it to each logger that does not propagate too, six times in each test. torch has
    a hundred of those.
    """
    root = logging.getLogger()
    root.addHandler(catching.handler)
    catching.attached_loggers.append(root)
    if catching.level is not None:
        catching.handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    return catching.handler


catching_logs.__enter__ = _attach_to_root


def pytest_ignore_collect(collection_path, config):
    """Import no file without a selected test: every worker would spend seconds on the others."""
    if collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        wanted = required(config.option.markexpr)
        if not all(may_have(collection_path, marker) for marker in wanted):
            return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    check_markers(items)


def pytest_collection_finish():
    """Leave what imports and collection made, millions of objects, out of garbage collection."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # nanobind reports what the interpreter does not free at its end
