"""A real Prometheus server that scrapes one address."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.command import wait_for
from support.ports import free_port


@dataclass(frozen=True)
class Prometheus:
    """A running server.

    at: time of all queries in Unix seconds; None means now. A target that is gone has no series
        from the next scrape on.
    """

    port: int
    at: float | None = None

    def query(self, expression: str) -> list[Any]:
        """Return the series of an instant query."""
        address = f"http://127.0.0.1:{self.port}/api/v1/query?"
        query = {"query": expression} | ({} if self.at is None else {"time": str(self.at)})
        with urllib.request.urlopen(address + urllib.parse.urlencode(query), timeout=300) as answer:
            return json.load(answer)["data"]["result"]  # type: ignore[no-any-return]

    def value(self, expression: str) -> float | None:
        """Return the value of a query with one series; None if there is no series."""
        found = self.query(expression)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None

    def at_last_scrape(self, name: str) -> Prometheus:
        """Return the server as of the last scrape that found a metric with one series."""
        (found,) = self.query(f"{name}[1h]")
        return replace(self, at=float(found["values"][-1][0]))


def needed(program: str) -> str:
    """Return the path of a program of Debian's package `prometheus`, or skip the test."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed (Debian's package prometheus has it)")
    return found


@contextlib.contextmanager
def scraping(target: int, folder: Path, *, seconds: int = 1) -> Iterator[Prometheus]:
    """Start a server that scrapes a port of this machine, and stop it at the end."""
    port, program = free_port(), needed("prometheus")
    folder.mkdir()
    interval = f"{seconds}s"
    job = {"job_name": "run", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    settings = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    options = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([program, *options], stdout=log, stderr=log)
    try:
        wait_for(lambda: _is_ready(port))
        yield Prometheus(port)
    finally:
        server.terminate()
        server.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5):
            return True
    except OSError:
        return False
