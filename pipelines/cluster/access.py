"""The whole cluster's API, beyond one namespace, and in words why it does not answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.shared.cluster import connect
from steadytrain.components.shared.kubeflow.connection import NAMESPACE_VARIABLE
from steadytrain.pipelines.cluster.line import Line, failed, passed

SECONDS: Final = (5.0, 20.0)
"""To connect, and from one byte of an answer to the next."""


@dataclass(frozen=True)
class Cluster:
    """The API of the whole cluster, and the namespace that is looked at.

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
    """A connection by a pod's own service account, or by KUBECONFIG; nothing is sent yet.

    Args:
        namespace: "": KFP_NAMESPACE, the pod's own, or that of the kubeconfig's context.

    Raises:
        Unreachable: neither is there.
    """
    found = connect()
    namespace = namespace or os.environ.get(NAMESPACE_VARIABLE, "")
    return Cluster(found.client, namespace or found.namespace)


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
