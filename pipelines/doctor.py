"""What this machine offers to a run, and what would prevent a run here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.strategies import DISK
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.stage import MIN_FREE_BYTES
from steadytrain.components.shared.toolchain import (
    DISK_REMEDY,
    REMEDY,
    missing_for_disk,
    missing_tools,
)
from steadytrain.components.shared.tracking.connect import (
    error_with_timeout,
    import_mlflow,
    short_timeouts,
    shown,
    tracking_errors,
)
from steadytrain.pipelines.early_checks import inputs

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


_PACKAGES = ("steadytrain", "kfp", "torch", "transformers", "accelerate", "mlflow")
_CREDENTIALS = (
    "HF_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_PROFILE",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "STEADYTRAIN_WEBHOOK_URL",
)


_HUB = "hub:"
_HUB_SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    topic: str
    text: str
    good: bool = True

    def as_data(self) -> dict[str, str]:
        """Return the result for programs, with the keys of the checks of a cluster."""
        state = "pass" if self.good else "fail"
        return {"topic": self.topic, "state": state, "text": self.text, "remedy": ""}


def examine(output: Path, config: RunConfig | None = None) -> list[Finding]:
    """Check the environment, versions, memory, disk, tracking server, hub, and credentials.

    Credentials are reported as present or absent, never shown.

    Args:
        config: a configuration whose hub: addresses must be reachable. Without one, a hub that
            does not answer is only reported.

    Raises:
        BadInput: the current folder has been removed. There, torch cannot even be imported.
    """
    try:
        output = output.absolute()
    except FileNotFoundError as error:
        raise BadInput(
            "the current folder has been removed", remedy="change to another one"
        ) from error
    return [
        *_machine(output),
        *_packages(),
        *_accelerators(),
        _compiler(),
        _offload(config),
        _tracking(),
        _hub(config),
        *_rate(config),
        *_credentials(),
    ]


def _machine(output: Path) -> Iterator[Finding]:
    yield Finding("python", sys.version.split()[0], good=sys.version_info >= (3, 11))
    memory = psutil.virtual_memory()
    yield Finding("memory", f"{size(memory.available)} of {size(memory.total)} available")
    yield Finding("cores", str(len(os.sched_getaffinity(0))))
    existing = next(folder for folder in [output, *output.parents] if folder.is_dir())
    free, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
    text = f"{size(free)} free at {existing}{'' if writable else ', not writable'}"
    yield Finding("disk", text, good=writable and free >= MIN_FREE_BYTES)


def _packages() -> Iterator[Finding]:
    for name in _PACKAGES:
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed: pip install 'steadytrain[train]'", good=False)


def _accelerators() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    yield Finding("accelerators", names or "none: training runs on the CPU")
    seen = read_gpus()
    if seen is None:
        return
    error = ""
    if torch.version.cuda and not count:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as failure:
            error = str(failure)
    cudnn, nccl = "", ""
    if torch.version.cuda:
        cudnn = str(torch.backends.cudnn.version() or "")  # type: ignore[no-untyped-call]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    build = Build(torch.__version__, torch.version.cuda or "", cudnn, nccl, count, error)
    for topic, text, good in compare(seen, build):
        yield Finding(topic, text, good)


def _compiler() -> Finding:
    """Check what compiles kernels at first use. Without a GPU, only torch.compile needs it."""
    missing = missing_tools()
    if not missing:
        return Finding("compiler", "kernels can be compiled: C++ compiler, ninja, Python's headers")
    without = "training.torch_compile and the kernels for GPUs are left out"
    return Finding("compiler", f"missing: {', '.join(missing)}: {without}; {REMEDY}", not _gpus())


def _offload(config: RunConfig | None) -> Finding:
    """Check what DeepSpeed compiles to keep optimizer states on disk."""
    if missing := missing_for_disk():
        asked = config is not None and config.compute.offload == DISK
        text = f"missing: {', '.join(missing)}: no compute.offload: disk; {DISK_REMEDY}"
        return Finding("offload to disk", text, good=not asked)
    return Finding("offload to disk", "possible with zero3: libaio can be linked")


def _gpus() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _tracking() -> Finding:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return Finding("tracking", "SQLite in the output folder (MLFLOW_TRACKING_URI is not set)")
    try:
        with short_timeouts(), tracking_errors(uri):
            import_mlflow().MlflowClient(uri).search_experiments(max_results=1)
    except SteadytrainError as error:
        return Finding("tracking", str(error), good=False)
    return Finding("tracking", f"{shown(uri)} answers")


def _hub(config: RunConfig | None) -> Finding:
    """Check that the hub can be reached, and has what a configuration names."""
    wanted = (
        [address for _, address in inputs(config) if address.startswith(_HUB)] if config else []
    )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Finding("hub", "offline (HF_HUB_OFFLINE is set): only earlier downloads are used")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        return Finding("hub", "not checked: huggingface_hub is not installed", good=not wanted)
    data = {address for _, address in config.data.addresses} if config else set()
    for address in wanted or [""]:
        failure = error_with_timeout(
            _HUB_SECONDS, partial(_query_hub, HfApi(), address, data=address in data)
        )
        if failure is not None:
            what = f"{address}: " if address else ""
            why = f"{what}{type(failure).__name__}: {str(failure).partition(chr(10))[0]:.200}"
            need = "" if wanted else "; only hub: addresses need it"
            return Finding("hub", f"{why}{need}", good=not wanted)
    return Finding("hub", f"has {', '.join(wanted)}" if wanted else "answers")


def _rate(config: RunConfig | None) -> Iterator[Finding]:
    """Check that the learning rate follows a global batch that differs from its base."""
    training = config.training if config else None
    if training is None or training.base_global_batch_size is None:
        return
    used, base = training.global_batch_size, training.base_global_batch_size
    scaling = f"training.lr_scaling {training.lr_scaling}"
    text = f"x {training.rate_scale:.3g} by {scaling}: {used} sequences per step, base {base}"
    good = training.lr_scaling != "none" or used == base
    if not good:
        text += "; set it to linear (SGD) or sqrt (Adam), or leave out the base"
    yield Finding("learning rate", text, good)


def _query_hub(api: Any, address: str, *, data: bool) -> None:
    name = address.removeprefix(_HUB).partition("?")[0]
    if not name:
        # Any page of the interface does.
        next(iter(api.list_models(limit=1)), None)
    elif data:
        api.dataset_info(name, timeout=_HUB_SECONDS)
    else:
        api.model_info(name, timeout=_HUB_SECONDS)


def _credentials() -> Iterator[Finding]:
    for name in _CREDENTIALS:
        yield Finding(name, "present" if os.environ.get(name) else "absent")
