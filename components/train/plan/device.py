"""What the ranks on this machine compute on, without a device context of our own."""

from __future__ import annotations

import os
import subprocess

import psutil

from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.plan.hardware import Gpu

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


def this_cpu(config: RunConfig) -> Gpu:
    """This machine's processor in the place of a GPU, with a rank's part of the free memory.

    How fast it is nobody knows before it is measured: what stands for it is not asked.

    Raises:
        BadInput: as for `refuse_what_needs_cuda`.
    """
    refuse_what_needs_cuda(config)
    free = psutil.virtual_memory().available / config.compute.nproc_per_node
    speeds = {"speed": 1.0, "half_tflops": 1.0, "fp32_tflops": 1.0}
    return Gpu(name="CPU", memory_gb=round(free / 1e9, 2), bf16=True, cuda=False, **speeds)


def refuse_what_needs_cuda(config: RunConfig) -> None:
    """What a CPU cannot do.

    Raises:
        BadInput: the configuration asks for it.
    """
    scaled = [("training.fp16", True, "training.bf16")] if config.training.fp16 else []
    for field, value, instead in [*scaled, *config.only_cuda]:
        raise BadInput(
            f"{field} = {value!r}: that needs a CUDA device", remedy=f"set {instead} instead"
        )
