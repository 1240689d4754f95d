"""Runs to judge, register and promote, on real MLflow stores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.tracking.connect import import_mlflow
from steadytrain.components.shared.workspace import Workspace

from support.judging import make_config, train


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


@pytest.fixture
def trained(tmp_path: Path, empty_store: Path) -> Callable[..., RunConfig]:
    """A run with a model of some skill; all runs share the output folder and its store."""

    def make(run: str, skill: float, changes: dict[str, Any] | None = None, **sections: Any):
        config = make_config(tmp_path / "output", run, **sections)
        workspace = Workspace.of(config)
        workspace.create()
        if not workspace.tracking_store.exists():
            shutil.copyfile(empty_store, workspace.tracking_store)
        train(config, skill, **(changes or {}))
        return config

    return make
