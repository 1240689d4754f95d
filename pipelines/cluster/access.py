"""A connection to the cluster's API, and in words why there is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines.cluster.line import Line, failed, passed
from steadytrain.pipelines.server.connection import NAMESPACE_VARIABLE

SECONDS: Final = (5.0, 20.0)
"""To connect, and from one byte of an answer to the next."""

_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NO_CLUSTER = (
    "set KUBECONFIG to a file that `kubectl` can use, or run it in a pod whose service account "
    "has a token"
)


@dataclass(frozen=True)
class Cluster:
    """The cluster's API, and the namespace that is looked at.

    api: a kubernetes.client.ApiClient.
    """

    api: Any
    namespace: str

    def get(self, path: str) -> Any:
        """The answer to a plain GET, as JSON.

        Raises:
            kubernetes.client.ApiException: the server refused.
        """
        answer, _, _ = self.api.call_api(
            path,
            "GET",
            response_type="object",
            auth_settings=["BearerToken"],
            _request_timeout=SECONDS,
        )
        return answer

    def acting_as(self, service_account: str) -> Cluster:
        """The same as a service account of the namespace, for those who may impersonate it."""
        from kubernetes import client

        other = client.ApiClient(self.api.configuration)
        name = f"system:serviceaccount:{self.namespace}:{service_account}"
        other.set_default_header("Impersonate-User", name)
        return Cluster(other, self.namespace)


def open_cluster(namespace: str = "") -> Cluster:
    """A connection by KUBECONFIG, or by a pod's own service account; nothing is sent yet.

    Args:
        namespace: "": KFP_NAMESPACE, the pod's own, that of the kubeconfig's context, kubeflow.

    Raises:
        BadInput: neither is there.
    """
    from kubernetes import client, config

    settings, file = client.Configuration(), os.environ.get("KUBECONFIG")
    try:
        config.load_kube_config(file, client_configuration=settings)
    except config.ConfigException as error:
        try:
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException:
            raise BadInput(f"no cluster: {error}", remedy=_NO_CLUSTER) from None
    settings.retries = 1
    return Cluster(client.ApiClient(settings), namespace or _namespace())


def _namespace() -> str:
    from kubernetes import config

    if found := os.environ.get(NAMESPACE_VARIABLE):
        return found
    if _POD_NAMESPACE.is_file():
        return _POD_NAMESPACE.read_text("utf-8").strip()
    try:
        _, current = config.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
    except config.ConfigException:
        return "kubeflow"
    return str(current["context"].get("namespace") or "kubeflow")


def check_connection(cluster: Cluster) -> Line:
    """Whether the API server answers, and whether the namespace is there.

    Raises:
        kubernetes.client.ApiException: the API server refuses the connection.
    """
    from kubernetes import client

    topic = "cluster"
    text = f"Kubernetes {cluster.get('/version')['gitVersion']}, namespace {cluster.namespace}"
    try:
        client.CoreV1Api(cluster.api).read_namespace(cluster.namespace, _request_timeout=SECONDS)
    except client.ApiException as error:
        if status_of(error) == 404:
            return failed(topic, f"{text}: there is none of that name", "give another --namespace")
        if status_of(error) != 403:  # its namespace may be all that an account sees
            raise
    return passed(topic, text)


def reason(error: Exception) -> str:
    """Why a call failed, in one line: what the API server says, or what the network did."""
    body = getattr(error, "body", None)
    if body:
        try:
            return str(json.loads(body)["message"])
        except (ValueError, KeyError, TypeError):
            pass
    status = getattr(error, "status", None)
    if status:
        return f"{status} {getattr(error, 'reason', '')}".strip()
    cause = getattr(error, "reason", None) or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0][:300]


def status_of(error: Exception) -> int:
    """The HTTP status of an API server's refusal; 0 where there was no answer."""
    return int(getattr(error, "status", 0) or 0)


def all_items(call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Everything that a call lists, page by page."""
    items: list[Any] = []
    token = ""
    while True:
        page = call(*arguments, limit=500, _continue=token, _request_timeout=SECONDS)
        items += page.items
        token = page.metadata._continue
        if not token:
            return items
