"""Access to the API of the whole cluster, and readable reasons when a call to it fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from steadytrain.components.shared.cluster import connect
from steadytrain.components.shared.kubeflow.variables import NAMESPACE_VARIABLE

APPLY: Final = "kubectl apply -k manifests/overlays/standalone (in a profile: kubeflow-profile)"
"""The fix for everything that the manifests provide."""

State = Literal["pass", "fail", "not asked"]


@dataclass(frozen=True)
class Line:
    """The result of one check, or why it was skipped.

    remedy: how to fix it, unless it passed.
    """

    topic: str
    state: State
    text: str
    remedy: str = ""


def passed(topic: str, text: str) -> Line:
    """Return a line for a check that passed."""
    return Line(topic, "pass", text)


def failed(topic: str, text: str, remedy: str) -> Line:
    """Return a line for a problem that would prevent a run."""
    return Line(topic, "fail", text, remedy)


def unchecked(topic: str, text: str, remedy: str) -> Line:
    """Return a line for a check that was not requested, or could not be done."""
    return Line(topic, "not asked", text, remedy)


SECONDS: Final = (5.0, 20.0)
"""Timeouts for connecting, and for the wait between two reads of a response."""


@dataclass(frozen=True)
class Cluster:
    """The API of the whole cluster, and the namespace to check.

    api: a kubernetes.client.ApiClient.
    """

    api: Any
    namespace: str

    def get(self, path: str) -> Any:
        """Return the JSON response to a plain GET.

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
        """Return this cluster as seen by a service account, which you must be allowed to
        impersonate.
        """
        from kubernetes import client

        other = client.ApiClient(self.api.configuration)
        name = f"system:serviceaccount:{self.namespace}:{service_account}"
        other.set_default_header("Impersonate-User", name)
        return Cluster(other, self.namespace)


def open_cluster(namespace: str = "") -> Cluster:
    """Connect with the pod's own service account, or with KUBECONFIG. Nothing is sent yet.

    Args:
        namespace: "" means KFP_NAMESPACE, or else the pod's own or the kubeconfig context's.

    Raises:
        Unreachable: there is neither a service account nor a kubeconfig.
    """
    connection = connect()
    namespace = namespace or os.environ.get(NAMESPACE_VARIABLE, "")
    return Cluster(connection.client, namespace or connection.namespace)


def check_connection(cluster: Cluster) -> Line:
    """Check that the API server answers and that the namespace exists.

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
            return failed(
                topic, f"{text}: there is no namespace of that name", "give another --namespace"
            )
        if status_of(error) != 403:  # the account may have no rights on namespaces
            raise
    return passed(topic, text)


def reason(error: Exception) -> str:
    """Return why a call failed, in one line: the API server's message, or the network error."""
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
    """Return the HTTP status of an API server's refusal. 0 means there was no answer."""
    return int(getattr(error, "status", 0) or 0)


def all_items(call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return everything that a call lists, from all pages."""
    items: list[Any] = []
    token = ""
    while True:
        page = call(*arguments, limit=500, _continue=token, _request_timeout=SECONDS)
        items += page.items
        token = page.metadata._continue
        if not token:
            return items
