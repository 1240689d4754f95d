"""What the ranks on this machine compute on, without a device context of our own."""

from __future__ import annotations

import os
import subprocess

from steadytrain.components.shared.config import ComputeConfig

CPU = "cpu"
_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def device_name(compute: ComputeConfig) -> str:
    """Name of the first GPU, such as "NVIDIA H100 80GB HBM3", or "cpu"."""
    if compute.device == CPU or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return CPU
    try:
        found = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return CPU
    return found.stdout.partition("\n")[0].strip() or CPU
