"""The device that ranks on this machine compute on, found without creating a device context."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psutil

from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.hardware import TFLOPS_OF_A_UNIT, Gpu

CPU = "cpu"
_CPUINFO = Path("/proc/cpuinfo")
_TFLOPS_OF_A_CORE = 0.1
"""Two 256-bit units at 3 GHz. With other units, a core has half or twice as many."""
_SUSTAINED = 0.3
_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}
"""Processor flags, as Linux names them."""
_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def device_name(compute: ComputeConfig) -> str:
    """Return the name of the first GPU, such as "NVIDIA H100 80GB HBM3", or "cpu"."""
    if compute.device == CPU or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return CPU
    try:
        found = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return CPU
    return found.stdout.partition("\n")[0].strip() or CPU


def this_cpu(config: RunConfig) -> Gpu:
    """Return this machine's CPU in place of a GPU, with one rank's share of the free memory.

    Its speed is assumed from the cores of a rank, until a calibration measures it.

    Raises:
        BadInput: as for `refuse_what_needs_cuda`.
    """
    refuse_what_needs_cuda(config)
    free = psutil.virtual_memory().available / config.compute.nproc_per_node
    compute = config.compute
    cores = compute.threads_per_rank or len(os.sched_getaffinity(0)) / compute.nproc_per_node
    peak = cores * _TFLOPS_OF_A_CORE
    speeds = {
        "speed": peak * _SUSTAINED / TFLOPS_OF_A_UNIT,
        "half_tflops": peak,
        "fp32_tflops": peak,
    }
    bf16 = multiplies_bfloat16(_CPUINFO)
    return Gpu(name="CPU", memory_gb=round(free / 1e9, 2), bf16=bf16, cuda=False, **speeds)


def multiplies_bfloat16(cpuinfo: Path) -> bool:
    """Return whether the processor has bfloat16 instructions: AMX, AVX-512, or ARM's.

    Without them, PyTorch computes bfloat16 via float32, which is slower than float32 alone.

    Args:
        cpuinfo: in the format of Linux's /proc/cpuinfo; the result is False if the file doesn't
            exist.
    """
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    lists = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    # A process may run on any core.
    return bool(lists) and all(_BFLOAT16 & set(flags.split()) for flags in lists)


def refuse_what_needs_cuda(config: RunConfig) -> None:
    """Reject settings that a CPU doesn't support.

    Raises:
        BadInput: the configuration has such a setting.
    """
    scaled = [("training.fp16", True, "training.bf16")] if config.training.fp16 else []
    for field, value, instead in [*scaled, *config.only_cuda]:
        raise BadInput(
            f"{field} = {value!r}: that needs a CUDA device", remedy=f"set {instead} instead"
        )
