"""What this machine offers to a run, and what would prevent a run here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.stage import MIN_FREE_BYTES
from steadytrain.components.shared.toolchain import REMEDY, missing_tools
from steadytrain.components.shared.tracking.connect import (
    error_with_timeout,
    import_mlflow,
    short_timeouts,
    shown,
    tracking_errors,
)
from steadytrain.pipelines.doctor_gpus import Build, compare, read_gpus
from steadytrain.pipelines.early_checks import inputs

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
    place = next(folder for folder in [output, *output.parents] if folder.is_dir())
    free, writable = shutil.disk_usage(place).free, os.access(place, os.W_OK)
    text = f"{size(free)} free at {place}{'' if writable else ', not writable'}"
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
