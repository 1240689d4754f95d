"""A pipeline server for each test, with no credentials but the test's own."""

from __future__ import annotations

import pytest

from support.kfp_server import serving

VARIABLES = (
    "KF_PIPELINES_ENDPOINT",
    "KF_PIPELINES_UI_ENDPOINT",
    "KF_PIPELINES_SA_TOKEN_PATH",
    "KFP_NAMESPACE",
    "KFP_EXISTING_TOKEN",
    "KFP_COOKIE",
    "KUBERNETES_SERVICE_HOST",
    "SSL_CERT_FILE",
    "KUBECONFIG",
)


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kfp():
    with serving() as server:
        yield server
