"""NVIDIA's GPUs as the driver sees them, and whether this PyTorch can use them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_SECONDS: Final = 20.0
_FIELDS: Final = (
    "index,name,memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw,"
    "ecc.errors.uncorrected.volatile.total"
)
_MIG: Final = re.compile(r"^\s+MIG (\S+)\s+Device", re.MULTILINE)
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Build:
    """What PyTorch was built with, and what it sees.

    cuda, cudnn, nccl: versions; "" if the build is without.
    count: number of GPUs that it can use.
    error: why CUDA cannot start; "" if it was not tried or has started.
    """

    torch: str
    cuda: str
    cudnn: str
    nccl: str
    count: int
    error: str = ""


@dataclass(frozen=True)
class Seen:
    """What nvidia-smi shows.

    driver, cuda: versions of the driver, and of the newest CUDA that it supports.
    gpus: a line for each GPU.
    mig: profiles of the MIG devices, such as 1g.10gb.
    """

    driver: str
    cuda: str
    gpus: tuple[str, ...]
    mig: tuple[str, ...]


def read_gpus() -> Seen | None:
    """Return what nvidia-smi shows; None if there is none, or it finds no GPU."""
    table, listed = _nvidia_smi(), _nvidia_smi("-L")
    rows = _nvidia_smi(f"--query-gpu={_FIELDS}", "--format=csv,noheader").splitlines()
    gpus = tuple(map(_line, rows))
    if not gpus:
        return None
    driver = re.search(r"Driver Version:\s*([\d.]+)", table)
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", table)
    return Seen(
        driver[1] if driver else "", cuda[1] if cuda else "", gpus, tuple(_MIG.findall(listed))
    )


def _nvidia_smi(*options: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *options], capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _line(row: str) -> str:
    index, name, *values = (part.strip() for part in row.split(","))
    used, total, busy, heat, power, errors = values
    text = f"{index} {name}: {used} of {total} used, {busy} busy, {heat} °C, {power}"
    return text if errors in ("0", "[N/A]", "N/A") else f"{text}, {errors} uncorrected ECC errors"


def compare(seen: Seen, build: Build) -> Iterator[tuple[str, str, bool]]:
    """Yield topic, text and whether it is good: GPUs, versions, and what prevents their use."""
    for line in seen.gpus:
        yield "gpu", line, "ECC errors" not in line
    if seen.mig:
        yield "mig", f"{len(seen.mig)} devices: {', '.join(seen.mig)}", True
    built = f"torch {build.torch}"
    if not build.cuda:
        text = f"{built} is built for the CPU and cannot use them; install a build for CUDA"
        yield "cuda", text, False
        return
    fits = not seen.cuda or _major(build.cuda) <= _major(seen.cuda)
    text = (
        f"driver {seen.driver or 'unknown'} supports CUDA {seen.cuda or 'unknown'}; {built} is "
        f"built for CUDA {build.cuda}, cuDNN {build.cudnn or 'none'}, NCCL {build.nccl or 'none'}"
    )
    if not fits:
        text += f"; update the driver, or install a torch for CUDA {_major(seen.cuda)}"
    yield "cuda", text, fits
    if build.count:
        return
    visible = os.environ.get(VISIBLE)
    if visible is not None and visible.strip() in ("", "-1"):
        text = f"{VISIBLE}={visible!r} hides all of them; unset it, or name some, such as 0,1"
    else:
        text = "a GPU is there, and PyTorch cannot use it"
        text += f": {build.error.splitlines()[0][:300]}" if build.error else ""
    yield "gpu use", text, False


def _major(version: str) -> int:
    return int(version.partition(".")[0])
