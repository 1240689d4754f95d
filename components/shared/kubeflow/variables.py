"""Environment variables that say how to reach a Kubeflow Pipelines server."""

from __future__ import annotations

from typing import Final

HOST_VARIABLE: Final = "KF_PIPELINES_ENDPOINT"
UI_VARIABLE: Final = "KF_PIPELINES_UI_ENDPOINT"
NAMESPACE_VARIABLE: Final = "KFP_NAMESPACE"
TOKEN_VARIABLE: Final = "KFP_EXISTING_TOKEN"
TOKEN_FILE_VARIABLE: Final = "KF_PIPELINES_SA_TOKEN_PATH"
COOKIE_VARIABLE: Final = "KFP_COOKIE"
CA_VARIABLE: Final = "SSL_CERT_FILE"
