"""Kubeflow Trainer's status server: it takes what the published one takes (KEP-2779)."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/tiny-a1/status"
TOKEN = "pod-token"


@dataclass
class StatusServer:
    """The server: its address, its authority, and the updates that it has accepted.

    refuse: a status to answer with instead.
    delay: seconds until an answer.
    begun: set once an update has arrived.
    """

    folder: Path
    port: int = 0
    refuse: int = 0
    delay: float = 0.0
    begun: threading.Event = field(default_factory=threading.Event)
    accepted: list[dict[str, Any]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """What the controller sets in a pod."""
        (self.folder / "token").write_text(f"{TOKEN}\n")
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{self.port}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.folder / "certificate.pem"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.folder / "token"),
        }

    def answer(self, path: str, authorization: str, body: bytes) -> int:
        """Return the status of an answer, and keep an update that is valid."""
        if self.refuse:
            return self.refuse
        if path != PATH:
            return 404
        if authorization != f"Bearer {TOKEN}":
            return 403
        content = json.loads(body)
        if len(body) > 1 << 16 or not _is_valid(content.get("trainerStatus")):
            return 422
        self.accepted.append(content["trainerStatus"])
        return 200


def _is_valid(status: Any) -> bool:
    """Return whether the CRD of Trainer 2.2 takes a trainerStatus."""
    known = {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}
    if not isinstance(status, dict) or not status.keys() <= known:
        return False
    datetime.strptime(status["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")
    percent, left = status.get("progressPercentage"), status.get("estimatedRemainingSeconds")
    numbers = percent is None or (type(percent) is int and 0 <= percent <= 100)
    numbers &= left is None or (type(left) is int and left >= 0)
    return numbers and all(
        set(item) == {"name", "value"}
        and all(isinstance(text, str) and 0 < len(text) <= 64 for text in item.values())
        for item in status["metrics"]
    )


@contextlib.contextmanager
def status_server(folder: Path) -> Iterator[StatusServer]:
    """Serve on loopback, with TLS by a certificate of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    state = StatusServer(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.begun.set()
            time.sleep(state.delay)
            status = state.answer(self.path, self.headers.get("Authorization", ""), body)
            if status != 200:
                state.refused.append(status)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        state.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield state
        finally:
            server.shutdown()
