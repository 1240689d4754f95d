"""Runs to evaluate, register, and promote, with real MLflow stores."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.workspace import Workspace

from support.evaluating import make_config, train
from support.stores import empty_store

__all__ = ["empty_store"]


@pytest.fixture
def trained(tmp_path: Path, empty_store: Path) -> Callable[..., RunConfig]:
    """Make a run whose model has a given skill. All runs share one output folder and its store."""

    def make(run: str, skill: float, changes: dict[str, Any] | None = None, **sections: Any):
        config = make_config(tmp_path / "output", run, **sections)
        workspace = Workspace.of(config)
        workspace.create()
        if not workspace.tracking_store.exists():
            shutil.copyfile(empty_store, workspace.tracking_store)
        train(config, skill, **(changes or {}))
        return config

    return make
