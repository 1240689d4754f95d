"""The GPUs that a plan knows with their prices, and the device of this machine.

Nothing here creates a device context.
"""

from __future__ import annotations

import datetime
import functools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

import psutil
import yaml
from pydantic import Field, TypeAdapter, ValidationError

from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.config.document import find_unfit, parse, read
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.section import Section

CPU = "cpu"
_CPUINFO = Path("/proc/cpuinfo")
_TFLOPS_OF_A_CORE = 0.1
"""Two 256-bit units at 3 GHz. With other units, a core has half or twice as many."""
_SUSTAINED = 0.3
_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}
"""Processor flags, as Linux names them."""
_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")

GIB: Final = 2**30
TFLOPS_OF_A_UNIT: Final = 312 / 5
"""TFLOPS per unit of the table's relative speed: an A100 has speed 5 and 312 TFLOPS. The slow end
of an interval uses the table's speed, the fast end the data sheet."""
Price = Annotated[float, Field(ge=0)]


class Prices(Section):
    """Prices of one GPU in USD per hour; None means unknown."""

    usd_per_hour: Price | None = None
    spot_usd_per_hour: Price | None = None


class Gpu(Prices):
    """A kind of GPU; `gpus.yaml` explains each field.

    best_for: "" for a machine's own CPU.
    cuda: False for a machine's own CPU.
    """

    name: str
    aliases: tuple[str, ...] = ()
    memory_gb: float = Field(..., gt=0)
    speed: float = Field(..., gt=0)
    half_tflops: float = Field(..., gt=0)
    fp32_tflops: float = Field(..., gt=0)
    bf16: bool
    cuda: bool = True
    best_for: str = ""

    @property
    def kind(self) -> str:
        """The word for it: "GPU" or "CPU"."""
        return "GPU" if self.cuda else "CPU"

    @property
    def memory(self) -> int:
        """Memory in bytes.

        The data sheet's GB count as 10^9 bytes. Drivers report slightly more; the difference is
        left to a display and the driver itself.
        """
        return int(self.memory_gb * 10**9)


class ListPrice(Prices):
    """What a provider asks for a GPU."""

    instance: str


class PriceList(Section):
    """Prices of a provider on a day; `prices.yaml` explains each field."""

    provider: str
    checked: datetime.date
    source: str
    via: str
    region: str = ""
    gpus: dict[str, ListPrice]


_TABLE: Final = TypeAdapter(tuple[Gpu, ...])
_LISTS: Final = TypeAdapter(tuple[PriceList, ...])
_PRICES: Final = TypeAdapter(dict[str, Prices])


@functools.cache
def all_gpus() -> tuple[Gpu, ...]:
    """Return steadytrain's table of GPUs, the smallest memory first."""
    place = resources.files("steadytrain.components.sizing") / "gpus.yaml"
    table = _TABLE.validate_python(yaml.safe_load(place.read_text(encoding="utf-8")))
    return tuple(sorted(table, key=lambda gpu: gpu.memory_gb))


@functools.cache
def price_lists() -> tuple[PriceList, ...]:
    """Return the list prices of providers."""
    place = resources.files("steadytrain.components.sizing") / "prices.yaml"
    return _LISTS.validate_python(yaml.safe_load(place.read_text(encoding="utf-8")))


def priced_by(provider: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the table with the prices of a provider only, and where they are from.

    Raises:
        BadInput: there are no prices of that provider.
    """
    lists = [each for each in price_lists() if each.provider == provider]
    if not lists:
        known = ", ".join(dict.fromkeys(each.provider for each in price_lists()))
        raise BadInput(
            f"--provider {provider}: the price table does not have it",
            remedy=f"one of {known}, or --prices FILE with your own",
        )
    found: dict[str, Prices] = {name: price for each in lists for name, price in each.gpus.items()}
    days = sorted(each.checked for each in lists)
    since = f"{days[0]} to {days[-1]}" if days[0] < days[-1] else f"{days[0]}"
    sources = "; ".join(dict.fromkeys(each.source for each in lists))
    table = tuple(gpu.model_copy(update=_both(found.get(gpu.name, Prices()))) for gpu in all_gpus())
    return table, f"{provider}'s list prices as published, checked {since} ({sources})"


def _both(price: Prices) -> dict[str, float | None]:
    return {
        "usd_per_hour": price.usd_per_hour,
        "spot_usd_per_hour": price.spot_usd_per_hour,
    }


def find_gpu(name: str, gpus: Sequence[Gpu] | None = None) -> Gpu:
    """Find a GPU by name, as people or its driver write it ("NVIDIA H100 80GB HBM3").

    Raises:
        BadInput: no GPU has that name.
    """
    known = all_gpus() if gpus is None else gpus
    found = known_gpu(name, known)
    if found is not None:
        return found
    raise BadInput(
        f"GPU {name!r}: the plan's table has no GPU of that name",
        remedy=f"one of {', '.join(gpu.name for gpu in known)}",
    )


def known_gpu(name: str, gpus: Sequence[Gpu] | None = None) -> Gpu | None:
    """Find a GPU by name; None if no GPU has that name."""
    for gpu in all_gpus() if gpus is None else gpus:
        if _plain(name) in map(_plain, (gpu.name, *gpu.aliases)):
            return gpu
    return None


def kind_of(name: str, memory_gb: float = 0) -> Gpu:
    """Find a GPU of the table by its name and the memory of each; 0 means the name's usual one.

    Args:
        name: "" if only the memory is known.

    Raises:
        BadInput: the table has no such GPU, or several.
    """
    table = all_gpus()
    named = find_gpu(name) if name else None
    if named and memory_gb in (0, named.memory_gb):
        return named
    family = named.name.partition("-")[0] if named else ""
    same = [gpu for gpu in table if not family or gpu.name.partition("-")[0] == family]
    found = [gpu for gpu in same if gpu.memory_gb == memory_gb]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in found or same)
    amount = "several" if found else "no"
    raise BadInput(
        f"{name or 'a GPU'} with {memory_gb:g} GB: the plan's table has {amount} such GPU"
        + ("s" if found else ""),
        remedy=f"name one of {known}",
    )


def priced(prices: Path, gpus: Sequence[Gpu] | None = None) -> tuple[Gpu, ...]:
    """Return the table with prices only from a file; prices that it leaves out are unknown.

    Args:
        prices: YAML: a GPU's name, with `usd_per_hour` and `spot_usd_per_hour` below it.

    Raises:
        BadInput: the file can't be read, names a GPU that is not in the table, or one twice.
    """
    known = all_gpus() if gpus is None else tuple(gpus)
    found, names = dict[str, Prices](), dict[str, str]()
    for name, value in _read_prices(prices).items():
        gpu = find_gpu(name, known).name
        if gpu in found:
            raise BadInput(
                f"--prices {prices}: {names[gpu]} and {name} are the same GPU, {gpu}",
                remedy="give one price for it",
            )
        found[gpu], names[gpu] = value, name
    unknown = Prices()
    return tuple(gpu.model_copy(update=found.get(gpu.name, unknown).model_dump()) for gpu in known)


def smallest_gpu(needed: int) -> Gpu | None:
    """Return the GPU with the smallest sufficient memory, or None."""
    return next((gpu for gpu in all_gpus() if needed <= gpu.memory), None)


def advice(needed: int) -> str:
    """Explain for people what `needed` bytes mean; "" if unknown (0)."""
    if not needed:
        return ""
    gpu = smallest_gpu(needed)
    return (
        f"even with micro-batch 1 and activation checkpointing a rank needs about {size(needed)}; "
        + (
            f"the smallest GPU with enough memory: {gpu.name} ({gpu.memory_gb:g} GB)"
            if gpu
            else "no single GPU has that much"
        )
    )


def _plain(name: str) -> str:
    return re.sub(r"^nvidia|[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def _read_prices(path: Path) -> Mapping[str, Prices]:
    what = f"--prices {path}"
    content = parse(read(path, what, "give a YAML file of prices"), what)
    if unfit := next(find_unfit(content), None):
        raise BadInput(f"{what}: {unfit.field}: {unfit.message}", remedy=unfit.remedy)
    try:
        return _PRICES.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"{what}: {where}: {first['msg']}",
            remedy="write it as `H100: {usd_per_hour: 8.00, spot_usd_per_hour: 3.20}`, one GPU "
            "per line",
        ) from error


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
        BadInput: as for `check_cuda_fields`.
    """
    check_cuda_fields(config)
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


def check_cuda_fields(config: RunConfig) -> None:
    """Reject settings that a CPU doesn't support.

    Raises:
        BadInput: the configuration has such a setting.
    """
    scaled = [("training.fp16", True, "training.bf16")] if config.training.fp16 else []
    for field, value, instead in [*scaled, *config.only_cuda]:
        raise BadInput(
            f"{field} = {value!r}: that needs a CUDA device", remedy=f"set {instead} instead"
        )
