"""Keeps tests from the services that whoever runs them uses: a test may start, send or delete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

_OUTSIDE: Final = (
    "AWS_",
    "KF_PIPELINES_",
    "KFP_",
    "KUBERNETES_SERVICE_",
    "MLFLOW_",
    "OTEL_",
    "WANDB_",
)
"""How the names of variables begin that name a service, or give access to it."""

_LEFT_BY_SETTERS: Final = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID")


@pytest.fixture(scope="session", autouse=True)
def isolated() -> Iterator[None]:
    """Hide these variables, and the clusters of ~/.kube/config."""
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith(_OUTSIDE)]:
            environment.delenv(name)
        environment.setenv("KUBECONFIG", os.devnull)
        yield


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Remove what MLflow's setters leave in the environment, those of a module's fixtures too."""
    yield
    for name in _LEFT_BY_SETTERS:
        os.environ.pop(name, None)
