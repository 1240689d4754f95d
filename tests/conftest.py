"""What holds for all tests."""

from __future__ import annotations

import os

import pytest

_STORES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID")
_FROM_OUTSIDE = {name: os.environ.get(name) for name in _STORES}


@pytest.fixture(autouse=True)
def forget_tracking_stores():
    """Remove the variables that MLflow's setters leave behind: the next test is not to use them."""
    yield
    for name, value in _FROM_OUTSIDE.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
