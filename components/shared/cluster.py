"""Access to one namespace of a Kubernetes cluster, with objects as plain data.

Rejections and missing responses are different errors. Lists are read again each time instead of
watched: a list cannot expire, needs no position to resume from after a broken connection, and a
training run has only a few objects.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.shared.errors import SteadytrainError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Manifest = dict[str, Any]

POD_VARIABLE: Final = "KFP_POD_NAME"
"""Environment variable with the name of a Kubeflow Pipelines step's own pod."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_TIMEOUT_SECONDS = (5, 20)
_NO_PERMISSION = "bind this pod's service account to the Role in steadytrain's manifests"
_LATER = "wait until it answers, and try again"
_NO_PERMISSION_ON_ALL = (
    "this permission covers the whole cluster: use an account that has it, or ask an "
    "administrator to bind a ClusterRole that grants it to yours"
)
NOT_YET: Final = re.compile(r"failed to sync (secret|configmap) cache")
"""Kubelet's message if it could not read a Secret or ConfigMap in time. It tries again."""
_WORDS: Final = {"GET": "read", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
_ADMISSION = re.compile(
    r"webhook|exceeded quota|violates PodSecurity|ValidatingAdmissionPolicy|denied the request",
    re.IGNORECASE,
)
"""A 403 with one of these messages is about the object, not about the sender's permissions."""
_PASSING = {408, 429, 500, 502, 503, 504}


class Unreachable(SteadytrainError):
    """The API server does not respond, or is temporarily unavailable."""

    passing = True


class Refused(SteadytrainError):
    """The API server rejected the request: permission, quota, webhook, schema, or no such object.

    Attributes:
        status: HTTP status of the response.
        reason: the server's reason, such as AlreadyExists.
    """

    def __init__(self, message: str, *, status: int, reason: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.status, self.reason = status, reason


class Denied(Refused):
    """The API server does not accept the sender, or does not permit this request (401, 403).

    A restarting API server also sends this for requests that it accepts a moment later.
    """

    denied = True


@dataclass(frozen=True)
class Kind:
    """A kind of object, and where the API serves it.

    namespaced: False if its objects are not in a namespace.
    suspendable: whether `spec.suspend` ends its pods and lets it make no others.
    """

    name: str
    plural: str
    group: str
    version: str
    namespaced: bool = True
    suspendable: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"


POD: Final = Kind("Pod", "pods", "", "v1")
EVENT: Final = Kind("Event", "events", "", "v1")
NODE: Final = Kind("Node", "nodes", "", "v1", namespaced=False)


class Cluster:
    """The objects in one namespace."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self.client, self.namespace = client, namespace

    def create(self, kind: Kind, manifest: Manifest) -> Manifest:
        return self._call("POST", self._path(kind), body=manifest, what=_named(kind, manifest))

    def get(self, kind: Kind, name: str) -> Manifest | None:
        """Return an object, or None if it does not exist."""
        try:
            return self._call("GET", self._path(kind, name), what=f"{kind.name} {name}")
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def list(
        self, kind: Kind, labels: Mapping[str, str] | None = None, *, fields: str = ""
    ) -> list[Manifest]:
        """Return the objects with these labels."""
        selector = ",".join(f"{name}={value}" for name, value in (labels or {}).items())
        query = [("labelSelector", selector), ("fieldSelector", fields)]
        items = self._call(
            "GET", self._path(kind), query=query, what=kind.plural, namespaced=kind.namespaced
        )
        return list(items["items"])

    def suspend(self, kind: Kind, name: str) -> None:
        """Ask a job's controller to end its pods and to make no others."""
        body = {"spec": {"suspend": True}}
        self._call("PATCH", self._path(kind, name), body=body, what=f"{kind.name} {name}")

    def delete(self, kind: Kind, name: str) -> None:
        """Delete an object, then the objects it owns. Returns at once; a missing object is fine."""
        try:
            self._call(
                "DELETE",
                self._path(kind, name),
                body={"propagationPolicy": "Background"},
                what=f"{kind.name} {name}",
            )
        except Refused as error:
            if error.status != 404:
                raise

    def offers(self, kind: Kind) -> bool:
        """Return whether the cluster serves a kind."""
        try:
            api = self._call("GET", kind.root, what=kind.root)
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return any(item["name"] == kind.plural for item in api["resources"])

    def _path(self, kind: Kind, name: str = "") -> str:
        tail = f"/{name}" if name else ""
        namespace = f"/namespaces/{self.namespace}" if kind.namespaced else ""
        return f"{kind.root}{namespace}/{kind.plural}{tail}"

    def _call(
        self,
        method: str,
        path: str,
        *,
        what: str,
        body: Manifest | None = None,
        query: Sequence[tuple[str, str]] = (),
        namespaced: bool = True,
    ) -> Manifest:
        """Send one request.

        Raises:
            Unreachable: if there is no response, or the server says to retry later.
            Denied: if the server does not accept the sender or does not permit the request.
            Refused: if the server rejects the request for any other reason.
        """
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        from steadytrain.components.shared.http_client import LimitExceeded

        try:
            result: Manifest = self.client.call_api(
                path,
                method,
                query_params=[item for item in query if item[1]],
                header_params={"Accept": "application/json", "Content-Type": _content_type(method)},
                body=body,
                auth_settings=["BearerToken"],
                response_type="object",
                _return_http_data_only=True,
                _request_timeout=_TIMEOUT_SECONDS,
            )
        except ApiException as error:
            scope, remedy = f"in namespace {self.namespace}", _NO_PERMISSION
            if not namespaced:
                scope, remedy = "of the whole cluster", _NO_PERMISSION_ON_ALL
            raise _refusal(error, f"{_WORDS[method]} {what} {scope}", remedy) from None
        except (HTTPError, OSError, LimitExceeded) as error:
            raise Unreachable(
                f"the cluster's API server does not answer: {error}",
                remedy=_LATER,
            ) from error
        return result


def _content_type(method: str) -> str:
    return "application/merge-patch+json" if method == "PATCH" else "application/json"


def connect() -> Cluster:
    """Connect to the cluster of this pod, or to the cluster that KUBECONFIG names.

    Raises:
        Unreachable: if there is neither.
    """
    from kubernetes import client, config

    from steadytrain.components.shared.http_client import limit

    settings = client.Configuration()
    try:
        if in_pod():
            config.load_incluster_config(client_configuration=settings)
            namespace = _NAMESPACE.read_text("utf-8").strip()
        else:
            # Pass the file explicitly: the client reads the variable only once, on import.
            file = os.environ.get("KUBECONFIG")
            config.load_kube_config(file, client_configuration=settings)
            _, context = config.list_kube_config_contexts(file)
            namespace = context["context"].get("namespace", "default")
    except (config.ConfigException, OSError) as error:
        raise Unreachable(
            f"no cluster: {error}",
            remedy="run the step in a pod with a service account, or set KUBECONFIG",
        ) from error
    settings.retries = False
    opened = client.ApiClient(settings)
    limit(opened.rest_client.pool_manager)
    return Cluster(opened, namespace)


def in_pod() -> bool:
    """Return whether this process runs in a pod with access to its cluster."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and _NAMESPACE.is_file()


def this_pod_name() -> str:
    """Return the name of this process's pod, as Kubeflow Pipelines sets it; "" elsewhere."""
    return os.environ.get(POD_VARIABLE, "") if in_pod() else ""


def _refusal(error: Any, what: str, permission: str) -> Refused | Unreachable:
    """Return an error with the server's own message from a failed response.

    Args:
        error: the client's exception.
        what: the request, for the message.
        permission: the fix if a permission is missing.
    """
    try:
        answer = json.loads(error.body)
    except (TypeError, ValueError):
        answer = {}
    message, reason = answer.get("message") or error.reason, answer.get("reason") or error.reason
    if error.status in _PASSING:
        return Unreachable(f"the cluster's API server reports an error: {message}", remedy=_LATER)
    denied = error.status in (401, 403) and not _ADMISSION.search(message)
    kind = Denied if denied else Refused
    return kind(
        f"cannot {what}: {message}",
        status=error.status,
        reason=reason,
        remedy=permission if denied else "fix what the message names",
    )


def _named(kind: Kind, manifest: Manifest) -> str:
    return f"{kind.name} {manifest['metadata']['name']}"
