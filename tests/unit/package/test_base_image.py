"""The base of the images is pinned by its digest, so nobody can replace it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PINNED = re.compile(r"[\w./:-]+@sha256:[0-9a-f]{64}")


def make_images(*settings):
    """Return what `make images` would build."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-s", "images", "DOCKER=echo", *settings]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)


def test_every_stage_starts_from_the_pinned_base_or_another_stage():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert PINNED.fullmatch(base)
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    assert len(stages) == len(re.findall(r"^FROM ", text, re.MULTILINE))
    known = {"${BASE}"}
    for source, name in stages:
        assert source in known
        known.add(name)


@pytest.mark.parametrize(
    "setting", ["BASE=python:3.11-slim", "DOCKER_FLAGS=--build-arg BASE=python:3.11-slim"]
)
def test_base_without_a_digest_is_rejected(setting):
    done = make_images(setting)
    assert done.returncode != 0
    assert "names no digest" in done.stderr
    assert "build" not in done.stdout
    told = make_images(setting, "ALLOW_UNPINNED_BASE=1")
    assert told.returncode == 0
    assert "BASE=python:3.11-slim" in told.stdout


@pytest.mark.parametrize("base", ["", f"registry.test/python@sha256:{'0' * 64}"])
def test_pinned_base_is_accepted(base):
    done = make_images(f"BASE={base}")
    assert done.returncode == 0, done.stderr
    assert (f"--build-arg BASE={base}" in done.stdout) == bool(base)
