"""Where the container images are pulled from."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml

from steadytrain.components.shared.environment import REGISTRY_VARIABLE, image
from steadytrain.components.shared.errors import BadInput


@pytest.mark.parametrize(
    "registry", ["registry.example.com", "localhost:5000", "10.0.0.1:5000/team/ml", "ghcr.io/a-b"]
)
def test_registry_precedes_the_name(monkeypatch, registry):
    monkeypatch.setenv(REGISTRY_VARIABLE, registry)
    assert image("step").startswith(f"{registry}/steadytrain/step:")


@pytest.mark.parametrize(
    "registry", ["https://ghcr.io", "ghcr.io/", "a b", "ghcr.io/x:tag", "UPPER/x", "a\n- b", "../x"]
)
def test_invalid_registry_is_rejected(monkeypatch, registry):
    monkeypatch.setenv(REGISTRY_VARIABLE, registry)
    with pytest.raises(BadInput, match="STEADYTRAIN_REGISTRY"):
        image("step")


def test_nodes_resolve_the_name_without_a_registry(monkeypatch):
    monkeypatch.delenv(REGISTRY_VARIABLE, raising=False)
    assert image("train").startswith("steadytrain/train:")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("registry", "code"), [("registry.example.com/team", 0), ("https://registry.example.com", 2)]
)
def test_compiled_pipeline_pulls_from_there(tmp_path, registry, code):
    path = tmp_path / "pipeline.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "steadytrain.pipelines.cli", "compile", "--output", path],
        env={**os.environ, REGISTRY_VARIABLE: registry},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert "STEADYTRAIN_REGISTRY" in done.stderr
        assert not path.exists()
        return
    spec = next(yaml.safe_load_all(path.read_text()))
    executors = spec["deploymentSpec"]["executors"].values()
    images = {item["container"]["image"] for item in executors if "container" in item}
    assert len(images) == 2
    assert all(name.startswith(f"{registry}/steadytrain/") for name in images)
