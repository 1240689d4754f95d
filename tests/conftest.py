"""What holds for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import signal

import pytest

_STORES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID")
_FROM_OUTSIDE = {name: os.environ.get(name) for name in _STORES}

# Where the tests run in the background, a shell has SIGINT ignored, and the processes that they
# start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()


def pytest_collection_finish():
    """Leave what imports and collection made, millions of objects, out of garbage collection."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # nanobind reports what the interpreter does not free at its end


@pytest.fixture(autouse=True)
def forget_tracking_stores():
    """Remove the variables that MLflow's setters leave behind: the next test is not to use them."""
    yield
    for name, value in _FROM_OUTSIDE.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
