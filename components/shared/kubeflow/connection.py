"""Connect to a Kubeflow Pipelines server, and explain why if that fails.

All calls go through KFP's generated client. kfp.Client is a wrapper around it that prints, has no
timeouts, retries a silent server five times with a traceback each, keeps a file in the home folder,
and mistakes a login page for an empty response. Only its handling of credentials is used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from steadytrain.components.shared.cluster import this_pod_name
from steadytrain.components.shared.config.secrets import find_secrets, redact
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.kubeflow.variables import (
    COOKIE_VARIABLE,
    HOST_VARIABLE,
    NAMESPACE_VARIABLE,
    TOKEN_VARIABLE,
    UI_VARIABLE,
)

if TYPE_CHECKING:
    from steadytrain.components.shared.kubeflow.client import Client

IN_CLUSTER: Final = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"

_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NO_HOST = (
    "give --host or set KF_PIPELINES_ENDPOINT; without a public address: "
    "`kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80`, then "
    "--host http://127.0.0.1:8080"
)


@dataclass(frozen=True)
class Server:
    """A server that has responded.

    host: its address, without a trailing slash.
    namespace: the user's namespace on a multi-user server; else "".
    """

    host: str
    namespace: str
    client: Client

    @cached_property
    def ui(self) -> str:
        """The address of the UI; "" if the host serves no pages. Asked when a link is needed."""
        given = os.environ.get(UI_VARIABLE, "")
        if not given and self.host != IN_CLUSTER and self.client.serves_pages():
            given = self.host
        return given.rstrip("/")

    @property
    def pipelines(self) -> Any:
        return self._api("PipelineServiceApi")

    @property
    def uploads(self) -> Any:
        return self._api("PipelineUploadServiceApi")

    @property
    def experiments(self) -> Any:
        return self._api("ExperimentServiceApi")

    @property
    def runs(self) -> Any:
        return self._api("RunServiceApi")

    @property
    def recurring_runs(self) -> Any:
        return self._api("RecurringRunServiceApi")

    def link(self, kind: str, name: str) -> str:
        """Return the UI's page for something: kind is runs, recurringrun or experiments."""
        return page(self.ui, kind, name) if self.ui else ""

    def _api(self, name: str) -> Any:
        import kfp_server_api

        return getattr(kfp_server_api, name)(self.client)


def page(ui: str, kind: str, name: str) -> str:
    """Return the address of a UI page: kind is runs, recurringrun or experiments."""
    return f"{ui.rstrip('/')}/#/{kind}/details/{name}"


def connect(host: str = "", namespace: str = "") -> Server:
    """Open a connection, and check that a KFP server responds.

    A token or cookie comes from the environment (KFP_EXISTING_TOKEN, KFP_COOKIE). A token may also
    come from the file that a cluster mounts for clients of pipelines. They are sent to the server
    but never shown.

    Args:
        host: the server's address. "" means KF_PIPELINES_ENDPOINT or, in a pod, the service in the
            cluster.
        namespace: the user's namespace on a multi-user server. "" means KFP_NAMESPACE or the pod's
            own.

    Raises:
        BadInput: if there is no address, it is not http or https, or a required namespace is
            unknown.
        ServerError: if there is no connection, no access, or no KFP server.
    """
    from steadytrain.components.shared.kubeflow.client import open_client

    address = _address(host)
    client = open_client(address)
    health = client.health()
    many_users = bool(health.get("multi_user"))
    return Server(address, _namespace(namespace) if many_users else "", client)


def _address(host: str) -> str:
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    address = host or os.environ.get(HOST_VARIABLE) or (IN_CLUSTER if in_pod else "")
    if not address:
        raise BadInput("the address of the Kubeflow Pipelines server is missing", remedy=_NO_HOST)
    if any(find_secrets(address)):
        raise BadInput(
            f"host = {redact(address)!r} contains a password",
            remedy=f"remove it; put a token in {TOKEN_VARIABLE}, or a cookie in {COOKIE_VARIABLE}",
        )
    if not _of_a_server(address):
        raise BadInput(f"host = {address!r} is not an http or https address", remedy=_NO_HOST)
    return address.rstrip("/")


def _of_a_server(address: str) -> bool:
    try:
        url = urlsplit(address)
        _ = url.port
    except ValueError:  # brackets that are not an IPv6 address, or a port that is not a number
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)


def _namespace(namespace: str) -> str:
    result = namespace or os.environ.get(NAMESPACE_VARIABLE, "")
    if not result and _POD_NAMESPACE.is_file():
        result = _POD_NAMESPACE.read_text("utf-8").strip()
    if not result:
        raise BadInput(
            "the server is multi-user, and no namespace is given",
            remedy=f"give your profile's namespace with --namespace or {NAMESPACE_VARIABLE}",
        )
    return result


def run_tags(job: str) -> dict[str, str]:
    """Return tags for the MLflow run: the id of the KFP run, and its page if the UI is known.

    Outside a pipeline on a cluster, there are no tags.
    """
    if not (job and this_pod_name()):
        return {}
    tags, ui = {"kubeflow.run_id": job}, os.environ.get(UI_VARIABLE, "")
    return tags | {"kubeflow.run_url": page(ui, "runs", job)} if ui else tags
