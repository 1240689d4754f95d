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


@pytest.fixture(scope="session", autouse=True)
def isolated() -> Iterator[None]:
    """Hide these variables, and the clusters of ~/.kube/config."""
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith(_OUTSIDE)]:
            environment.delenv(name)
        environment.setenv("KUBECONFIG", os.devnull)
        yield
