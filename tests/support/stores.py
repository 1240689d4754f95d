"""Fixtures of the tests that use MLflow: a clean environment, a store made once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steadytrain.components.shared.tracking.connect import import_mlflow


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MLFLOW_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as MLflow creates it, which takes some seconds: made once, copied often."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    import_mlflow().MlflowClient(f"sqlite:///{path}").search_experiments()
    return path
