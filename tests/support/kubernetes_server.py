"""A Kubernetes API server with preset answers, for clusters that aren't available here."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml


@dataclass
class Answers:
    """Answers by path. An integer is the status of an error; unknown paths return 404."""

    port: int
    of: dict[str, Any] = field(default_factory=dict)

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for this server."""
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "it",
                    "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
                    "clusters": [
                        {"name": "it", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
                    ],
                    "users": [{"name": "it", "user": {}}],
                }
            )
        )
        return path

    def listing(self, path: str, *items: Any) -> None:
        self.of[path] = {"metadata": {}, "items": list(items)}


def node(
    gpus: str = "",
    host_memory: str = "8Gi",
    *,
    cpu: str = "8",
    unschedulable: bool = False,
    ready: str = "True",
    mig: Mapping[str, str] | None = None,
    **labels: str,
) -> dict[str, Any]:
    """Return a node as the API lists it.

    mig: number of MIG devices by profile, as NVIDIA's `mixed` strategy offers them.
    labels: GPU labels without their prefix, such as `product` for nvidia.com/gpu.product; a name
        with a dot, such as `mig.config`, is one of nvidia.com.
    """
    allocatable = {"cpu": cpu, "memory": host_memory, **({"nvidia.com/gpu": gpus} if gpus else {})}
    allocatable |= {f"nvidia.com/mig-{profile}": count for profile, count in (mig or {}).items()}
    named = {name if "." in name else f"gpu.{name}": text for name, text in labels.items()}
    return {
        "metadata": {"labels": {f"nvidia.com/{name}": text for name, text in named.items()}},
        "spec": {"unschedulable": unschedulable},
        "status": {
            "allocatable": allocatable,
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


@contextlib.contextmanager
def kubernetes_server() -> Iterator[Answers]:
    """Run the server on loopback."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def respond(self) -> None:
            answer = answers.of.get(urlsplit(self.path).path, 404)
            refused = isinstance(answer, int)
            body = {"message": f"{self.path} is refused"} if refused else answer
            content = json.dumps(body).encode()
            self.send_response(answer if refused else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = respond  # noqa: N815  the names are http.server's

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    answers = Answers(server.server_port)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield answers
    finally:
        server.shutdown()
        server.server_close()
