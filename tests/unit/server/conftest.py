"""A pipeline server for each test, with no credentials but the test's own."""

from __future__ import annotations

import pytest

from support.kfp_server import serving


@pytest.fixture(autouse=True)
def own_certificates(monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)


@pytest.fixture
def kfp():
    with serving() as server:
        yield server
