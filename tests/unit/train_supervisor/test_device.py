"""The name of the device, as the driver's own tool reports it."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.sizing.hardware import device_name


@pytest.fixture
def tool(tmp_path, monkeypatch):
    def install(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_first_gpu_counts(tool):
    tool("echo 'NVIDIA A100-SXM4-80GB'; echo 'NVIDIA A100-SXM4-80GB'")
    assert device_name(ComputeConfig()) == "NVIDIA A100-SXM4-80GB"
    assert device_name(ComputeConfig(device="cpu")) == "cpu"


def test_hidden_gpus_do_not_count(tool, monkeypatch):
    tool("echo 'NVIDIA A100-SXM4-80GB'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_name(ComputeConfig()) == "cpu"


@pytest.mark.parametrize("script", ["exit 9", "true"])
def test_tool_without_gpus_means_cpu(tool, script):
    tool(script)
    assert device_name(ComputeConfig()) == "cpu"


def test_missing_tool_means_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_name(ComputeConfig()) == "cpu"
