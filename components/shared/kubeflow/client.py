"""KFP's generated client, with timeouts, credentials, and errors that users can act on."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import kfp_server_api
import urllib3
from urllib3 import exceptions as failures

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import ServerError
from steadytrain.components.shared.http_client import LimitExceeded, limit
from steadytrain.components.shared.kubeflow.variables import (
    CA_VARIABLE,
    COOKIE_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
)

_TOKEN_FILE: Final = "/var/run/secrets/kubeflow/pipelines/token"

_SECONDS: Final = (10.0, 60.0)
"""Timeouts to connect, and between two bytes of a response. `http_client` limits the sum."""

_IDS: Final = {
    "V2beta1Run": "run_id",
    "V2beta1RecurringRun": "recurring_run_id",
    "V2beta1Experiment": "experiment_id",
    "V2beta1Pipeline": "pipeline_id",
    "V2beta1PipelineVersion": "pipeline_version_id",
}
"""By kind of answer, the field that names the object."""

_LOGIN = (
    f"log in with the browser and set {COOKIE_VARIABLE} to the session's cookie (NAME=VALUE), or "
    f"set {TOKEN_VARIABLE}; from a machine with kubectl, a port-forward avoids the login"
)


class Client(kfp_server_api.ApiClient):  # type: ignore[misc]  # it carries no types
    """The client that all calls of the generated API classes go through."""

    def call_api(self, resource_path: str, method: str, *args: Any, **options: Any) -> Any:
        """Make a call as the generated client does.

        Raises:
            ServerError: if the call failed, or the response is not from KFP.
        """
        options["_request_timeout"] = options.get("_request_timeout") or _SECONDS
        with _explained(self.configuration.host):
            answer = super().call_api(resource_path, method, *args, **options)
        # The generated client would read an HTML page as an object without fields.
        if "json" not in (self.last_response.getheader("content-type") or ""):
            raise _error(
                f"{self.configuration.host} returns a web page instead of data: it requires a "
                "login, or is not Kubeflow Pipelines",
                _LOGIN,
            )
        if what := _lacks(answer):
            raise _error(
                f"{self.configuration.host} answers without {what}, so it is not Kubeflow "
                "Pipelines",
                "check the address; if the request was to start something, check in the UI "
                "whether it did",
            )
        return answer

    def text(self, path: str, *, most_bytes: int) -> str:
        """Return the end of a response in plain text, such as the log of a pod.

        Raises:
            ServerError: if the call failed.
        """
        options = {"_preload_content": False, "_return_http_data_only": True}
        with _explained(self.configuration.host):
            answer = super().call_api(
                path, "GET", auth_settings=["Bearer"], _request_timeout=_SECONDS, **options
            )
            kept = b""
            for part in answer.stream(1 << 16):
                kept = (kept + part)[-most_bytes:]
        return kept.decode("utf-8", "replace")

    def serves_pages(self) -> bool:
        """Return whether the address shows the UI. That of the API alone has no pages."""
        options = {"_preload_content": False, "_return_http_data_only": True}
        try:
            with _explained(self.configuration.host):
                answer = super().call_api(
                    "/", "GET", auth_settings=["Bearer"], _request_timeout=_SECONDS, **options
                )
        except ServerError:
            return False
        answer.release_conn()
        return "text/html" in (answer.headers.get("content-type") or "")

    def health(self) -> Mapping[str, Any]:
        """Return what the server reports about itself.

        Raises:
            ServerError: if it cannot be reached, is too old, or is not a KFP server.
        """
        try:
            answer = self._get("/apis/v2beta1/healthz")
        except ServerError as error:
            if error.status != 404:
                raise
            raise self._too_old_or_none() from None
        return answer if isinstance(answer, Mapping) else {}

    def _too_old_or_none(self) -> ServerError:
        host = self.configuration.host
        try:
            self._get("/apis/v1beta1/healthz")
        except ServerError:
            return _error(
                f"{host} answers, but has no Kubeflow Pipelines API (404)",
                "give the address that serves /apis/v2beta1; on a full Kubeflow installation "
                "it often ends in /pipeline",
            )
        return _error(
            f"{host} is a version 1 Kubeflow Pipelines server, without the v2beta1 API",
            "upgrade it to version 2.0 or later",
        )

    def _get(self, path: str) -> Any:
        options = {"response_type": "object", "_return_http_data_only": True}
        return self.call_api(path, "GET", auth_settings=["Bearer"], **options)


def open_client(host: str) -> Client:
    """Return a client with the credentials from the environment. It sends nothing yet."""
    configuration = kfp_server_api.Configuration(host=host)
    configuration.ssl_ca_cert = os.environ.get(CA_VARIABLE) or None
    # urllib3 retries a POST only if it cannot have reached the server. A redirect means a login.
    configuration.retries = urllib3.Retry(
        total=2,
        redirect=False,
        status_forcelist=(429, 502, 503, 504),
        raise_on_status=False,
        backoff_factor=0.5,
    )
    _authorize(configuration)
    client = Client(configuration, cookie=os.environ.get(COOKIE_VARIABLE) or None)
    limit(client.rest_client.pool_manager)
    return client


def _authorize(configuration: kfp_server_api.Configuration) -> None:
    token = os.environ.get(TOKEN_VARIABLE, "")
    configuration.api_key_prefix["authorization"] = "Bearer"
    if token:
        configuration.api_key["authorization"] = token
        return
    # kfp.client looks for the token under the same names. A pipeline step cannot import kfp.client.
    path = Path(os.environ.get(TOKEN_FILE_VARIABLE) or _TOKEN_FILE)
    if path.is_file():
        configuration.refresh_api_key_hook = partial(_read_token, path)
        _read_token(path, configuration)


def _read_token(path: Path, configuration: kfp_server_api.Configuration) -> None:
    """Read the token again for each call, because the kubelet renews it."""
    configuration.api_key["authorization"] = path.read_text("utf-8").strip()


@contextlib.contextmanager
def _explained(host: str) -> Iterator[None]:
    """Turn errors of the network and the server into ServerError."""
    try:
        yield
    except kfp_server_api.ApiException as error:
        raise _refusal(host, error) from None
    except failures.MaxRetryError as error:
        raise _broken(host, error.reason or error) from None
    except failures.HTTPError as error:
        raise _broken(host, error) from None
    except LimitExceeded as error:
        raise _error(
            f"{host}: {error}",
            "a proxy or something else than Kubeflow Pipelines may be answering there; if the "
            "request was to start something, check in the UI whether it did",
            passing=error.passing,
        ) from None


def _broken(host: str, error: Exception) -> ServerError:
    """Return the error for a missing response, with reason and fix."""
    name = urlsplit(host).hostname
    if isinstance(error, failures.NameResolutionError):
        return _error(
            f"{host}: the name {name} cannot be resolved",
            "check the address; a name in svc.cluster.local exists only in the cluster: use a "
            "port-forward from outside",
            passing=True,
        )
    if isinstance(error, failures.NewConnectionError):
        return _error(
            f"{host}: nothing is listening there (connection refused, or no route to it)",
            "check the address and the port; if it is a port-forward, restart it",
            passing=True,
        )
    if isinstance(error, failures.TimeoutError):
        return _error(
            f"{host}: no answer in time",
            "a firewall or VPN may be in the way; if the request was to start something, check "
            "in the UI whether it did",
            passing=True,
        )
    if isinstance(error, failures.SSLError):
        return _error(
            f"{host}: no secure connection ({_reason(error)})",
            f"if a private authority signed the certificate, set {CA_VARIABLE} to its file; for "
            "a server without TLS, use http://",
        )
    return _error(
        f"{host}: the connection broke ({type(error).__name__})",
        "try again; if the request was to start something, check in the UI whether it did; a "
        "server with TLS needs https://",
        passing=True,
    )


def _reason(error: Exception) -> str:
    """Return the part of OpenSSL's message that helps people."""
    text = str(error)
    match = re.search(r"certificate verify failed: ([^(]+?)(?: \(_ssl|$)", text)
    return match[1] if match else text.split("] ")[-1].split(" (_ssl")[0][:120]


def _refusal(host: str, error: kfp_server_api.ApiException) -> ServerError:
    """Return the error for an unsuccessful response, with the server's message and the fix."""
    status, said = int(error.status or 0), _words(error.body)
    has = "the token or cookie" if _has_credentials() else "a request without token or cookie"
    message, remedy = (
        f"{host} rejected the request: {said or error.reason} ({status})",
        "fix what it names",
    )
    if 300 <= status < 400:
        message, remedy = f"{host} redirects {has} to another address ({status})", _LOGIN
    elif status == 401:
        message, remedy = f"{host} does not accept {has} (401)", f"it may have expired: {_LOGIN}"
    elif status == 403:
        message = f"{host} denies permission for this (403): {said or 'no reason given'}"
        remedy = "check --namespace, and ask for permission there; or " + _LOGIN
    elif status >= 500:
        message = f"{host} failed: {said or error.reason} ({status})"
        remedy = "check the log of the ml-pipeline pod; try again when the server works"
    failed = _error(message, remedy, passing=status in (429, 502, 503, 504))
    failed.status, failed.denied = status, status in (401, 403)
    return failed


def _words(body: str | None) -> str:
    """Return the message in an error body: KFP has three formats, HTML pages of proxies none."""
    try:
        content = json.loads(body or "")
    except ValueError:
        plain = (body or "").strip()
        return "" if plain.startswith("<") else redact(plain[:300])
    if not isinstance(content, dict):
        return ""
    message = content.get("message") or content.get("error") or content.get("error_message") or ""
    return redact(str(message)[:600])


def _lacks(answer: Any) -> str:
    """Return the id that every answer of this kind has and this one lacks; "" if it has it."""
    field = _IDS.get(type(answer).__name__, "")
    value = getattr(answer, field) if field else "known"
    return "" if isinstance(value, str) and value else field


def _has_credentials() -> bool:
    return bool(os.environ.get(TOKEN_VARIABLE) or os.environ.get(COOKIE_VARIABLE))


def _error(message: str, remedy: str, *, passing: bool = False) -> ServerError:
    return ServerError(redact(message), remedy=remedy, passing=passing)
