"""A Kubernetes API server with the features that the launcher uses: objects by kind and name.

It stores what it receives and answers like the real one for existing and missing objects. It can
also be unavailable, or refuse requests. A test plays the controllers and kubelets with `put`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from steadytrain.components.shared.cluster import Cluster

NAMESPACE = "training"


class ApiServer:
    """The objects in one namespace. Each look at them is at a copy: other threads change them.

    calls: the method and kind of each request.
    refusals: per kind, the answers (status and body) for its next creations.
    hidden: kinds whose objects may not be read.
    away: whether every request gets 503.
    denial: status and body for every request; None denies nothing.
    suspended: names of objects in the order in which they were suspended.
    lossy: whether the next creation succeeds but its response is lost.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.calls: list[tuple[str, str]] = []
        self.refusals: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.hidden: set[str] = set()
        self.denial: tuple[int, dict[str, Any]] | None = None
        self.suspended: list[str] = []
        self.away = self.lossy = False

    def put(self, kind: str, manifest: dict[str, Any]) -> None:
        self.objects[kind, manifest["metadata"]["name"]] = manifest

    def names(self, kind: str) -> list[str]:
        return sorted(name for found, name in list(self.objects) if found == kind)

    def answer(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, dict[str, Any]] | None:
        """Return status and body; None breaks the connection."""
        url = urlsplit(path)
        kind, _, name = url.path.partition(f"/namespaces/{NAMESPACE}/")[2].partition("/")
        self.calls.append((method, kind))
        if self.away:
            return 503, {"message": "the server is starting", "reason": "ServiceUnavailable"}
        if self.denial:
            return self.denial
        if not kind:
            return 200, {"resources": [{"name": "trainjobs"}, {"name": "trainjobs/status"}]}
        if method == "GET" and not name:
            return 200, {"items": self._list(kind, parse_qs(url.query))}
        if method == "POST":
            assert body is not None
            return self._create(kind, body)
        if method == "GET" and kind in self.hidden:
            return 403, {"message": f"{kind} is forbidden", "reason": "Forbidden"}
        found = self.objects.get((kind, name))
        if found is None:
            return 404, {"message": f'{kind} "{name}" not found', "reason": "NotFound"}
        if method == "DELETE":
            self._delete(kind, name)
        if method == "PATCH" and body == {"spec": {"suspend": True}}:
            self.suspended.append(name)
            found.setdefault("status", {})["conditions"] = [{"type": "Suspended", "status": "True"}]
        return 200, found

    def _list(self, kind: str, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        found = [item for (held, _), item in list(self.objects.items()) if held == kind]
        for pair in filter(None, query.get("labelSelector", [""])[0].split(",")):
            name, _, value = pair.partition("=")
            found = [item for item in found if item["metadata"]["labels"].get(name) == value]
        for pair in filter(None, query.get("fieldSelector", [""])[0].split(",")):
            found = [item for item in found if item["involvedObject"]["name"] == pair.split("=")[1]]
        return found

    def _create(self, kind: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if self.refusals.get(kind):
            return self.refusals[kind].pop(0)
        name = body["metadata"]["name"]
        if (kind, name) in self.objects:
            return 409, {"message": f'{kind} "{name}" already exists', "reason": "AlreadyExists"}
        self.objects[kind, name] = body
        if self.lossy:
            self.lossy = False
            return None
        return 201, body

    def _delete(self, kind: str, name: str) -> None:
        """Delete an object and everything it owns."""
        del self.objects[kind, name]
        if kind == "trainjobs":
            for key in [key for key in list(self.objects) if key[0] == "pods"]:
                if key[1].startswith(f"{name}-"):
                    del self.objects[key]


@contextlib.contextmanager
def serving() -> Iterator[tuple[ApiServer, Cluster]]:
    """Yield a server on this machine and a connection to it."""
    from kubernetes import client

    state = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            answer = state.answer(self.command, self.path, body)
            if answer is None:
                self.close_connection = True
                return
            content = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = _handle  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    settings = client.Configuration(host=f"http://127.0.0.1:{server.server_port}")
    settings.retries = False
    try:
        yield state, Cluster(client.ApiClient(settings), NAMESPACE)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
