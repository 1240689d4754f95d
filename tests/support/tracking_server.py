"""The tracking server of the manifests as a process: with their arguments, settings and Secret."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from support.manifests import MANIFESTS
from support.ports import free_port

_PIPE_TO_STDOUT = '#!/bin/sh\nexec {kubectl} "$@" --dry-run=client --output=yaml\n'


def generated_secret(scratch: Path, *more: str) -> dict[str, str]:
    """Return what `create-secret.sh` would create, without sending it to a cluster.

    Args:
        more: additional lines, as in the script's FILE.
    """
    tools, file = scratch / "tools", scratch / "more.env"
    tools.mkdir(exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in more))
    (tools / "kubectl").write_text(_PIPE_TO_STDOUT.format(kubectl=shutil.which("kubectl")))
    (tools / "kubectl").chmod(0o755)
    done = subprocess.run(
        ["sh", MANIFESTS / "create-secret.sh", "some-namespace", file],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    made = yaml.safe_load(done.stdout)
    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == (
        "steadytrain",
        "some-namespace",
    )
    return {key: base64.b64decode(value).decode() for key, value in made["data"].items()}


def server_process(
    scratch: Path, secret: Mapping[str, str], port: int
) -> tuple[list[str], dict[str, str]]:
    """Return the manifest container's command and environment, with folders below `scratch`."""
    objects = {
        item["kind"]: item
        for item in yaml.safe_load_all((MANIFESTS / "base" / "mlflow.yaml").read_text())
    }
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    settings, store = scratch / "etc", scratch / "store"
    settings.mkdir(exist_ok=True)
    store.mkdir(exist_ok=True)

    def here(text: str) -> str:
        return text.replace("/etc/mlflow", str(settings)).replace("/mlflow/", f"{store}/")

    for name, content in objects["ConfigMap"]["data"].items():
        (settings / name).write_text(here(content))
    command = [
        word.replace("--host=0.0.0.0", "--host=127.0.0.1").replace("=5000", f"={port}")
        for word in container["command"]
    ]
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for item in container["env"]:
        value = _value(item, secret)
        if value is not None:
            environment[item["name"]] = here(value)
    return command, {**environment, "HOME": str(scratch)}


def _value(item: Mapping[str, Any], secret: Mapping[str, str]) -> str | None:
    if "value" in item:
        return str(item["value"])
    return secret.get(item["valueFrom"]["secretKeyRef"]["key"])


@contextlib.contextmanager
def tracking_server(scratch: Path, secret: Mapping[str, str]) -> Iterator[str]:
    """Run a server and yield its address."""
    port = free_port()
    command, environment = server_process(scratch, secret, port)
    address = f"http://127.0.0.1:{port}"
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=scratch, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _until_healthy(address, process, scratch / "log")
            yield address
        finally:
            process.terminate()
            process.wait()


def _until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{address}/health", timeout=60).close()
            return
        time.sleep(0.2)
