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
from typing import Annotated, Final, NamedTuple

import psutil
import yaml
from pydantic import Field, TypeAdapter, ValidationError

from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.config.document import find_unfit, parse, read
from steadytrain.components.shared.effects import Section
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import size

CPU = "cpu"
_CPUINFO = Path("/proc/cpuinfo")
_TFLOPS_OF_A_CORE = 0.1
"""Two 256-bit units at 3 GHz. With other units, a core has half or twice as many."""
_SUSTAINED = 0.3
_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}
"""Processor flags, as Linux names them."""
_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")

_PART: Final = re.compile(r"(?P<gpu>.+?)[-_ ](?:mig[-_ ])?(?P<profile>\d+g\.\d+gb)")
"""The name of a MIG device, as people, its driver and node labels write it."""

GIB: Final = 2**30
TFLOPS_OF_A_UNIT: Final = 312 / 5
"""TFLOPS per unit of the table's relative speed: an A100 has speed 5 and 312 TFLOPS. The slow end
of an interval uses the table's speed, the fast end the data sheet."""
OWN_PRICES: Final = (
    "steadytrain's own table of round figures without a date; --provider and --prices take others"
)
_CORE: Final = "CPU"
"""The name of a core of a machine without GPUs, in tables of prices and in plans."""
_CORE_USD: Final = 0.05
"""A round figure. AWS asks 0.04 for half of an m7g.large (prices.yaml)."""
Price = Annotated[float, Field(ge=0, le=1e6)]


class Prices(Section):
    """Prices of one GPU in USD per hour; None means unknown."""

    usd_per_hour: Price | None = None
    spot_usd_per_hour: Price | None = None


class Gpu(Prices):
    """A kind of GPU; `gpus.yaml` explains each field.

    best_for: "" for a machine's own CPU.
    cuda: False for a machine's own CPU.
    mig: profiles of MIG devices that it can be divided into.
    profile: that of a MIG device; "" for a complete GPU.
    offered_as: the resource name on the nodes of a cluster; "" if there is none to look at.
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
    mig: tuple[str, ...] = ()
    profile: str = ""
    offered_as: str = ""

    def part(self, profile: str) -> Gpu:
        """Return a MIG device of this GPU, whose price is unknown.

        Raises:
            BadInput: it has no such profile.
        """
        if profile not in self.mig:
            raise BadInput(
                f"{self.name} with the MIG profile {profile}: the plan's table has no such device",
                remedy=f"one of {', '.join(self.mig)}"
                if self.mig
                else f"leave the profile out, or set --gpu to one of {', '.join(_divisible())}",
            )
        slices, memory_gb = _slices(profile)
        share = slices / max(_slices(each)[0] for each in self.mig)
        return Gpu(
            name=f"{self.name}-MIG-{profile}",
            memory_gb=memory_gb,
            speed=self.speed * share,
            half_tflops=self.half_tflops * share,
            fp32_tflops=self.fp32_tflops * share,
            bf16=self.bf16,
            best_for=f"sharing one {self.name} between programs",
            profile=profile,
        )

    @property
    def resource(self) -> str:
        """The name under which NVIDIA's device plugin offers it on Kubernetes.

        Of MIG devices, it is that of its `mixed` strategy, unless nodes say otherwise.
        """
        if self.offered_as:
            return self.offered_as
        return f"nvidia.com/mig-{self.profile}" if self.profile else "nvidia.com/gpu"

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
    path = resources.files("steadytrain.components.sizing") / "gpus.yaml"
    table = _TABLE.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    return tuple(sorted(table, key=lambda gpu: gpu.memory_gb))


@functools.cache
def price_lists() -> tuple[PriceList, ...]:
    """Return the list prices of providers."""
    path = resources.files("steadytrain.components.sizing") / "prices.yaml"
    return _LISTS.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))


class PriceTable(NamedTuple):
    """The table of GPUs with prices.

    core: USD per hour for a core of a machine without GPUs, with its memory; None if unknown.
    origin: where the prices are from.
    """

    gpus: tuple[Gpu, ...]
    core: float | None
    origin: str


def own_prices() -> PriceTable:
    """Return steadytrain's own table."""
    return PriceTable(all_gpus(), _CORE_USD, OWN_PRICES)


_OLD: Final = 180
"""Days after which prices are doubted."""


def priced_by(provider: str, today: datetime.date | None = None) -> PriceTable:
    """Return the table with the prices of a provider only.

    Its origin says if some are old.

    Args:
        today: None means this day.

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
    prices: dict[str, Prices] = {name: price for each in lists for name, price in each.gpus.items()}
    days = sorted(each.checked for each in lists)
    since = f"{days[0]} to {days[-1]}" if days[0] < days[-1] else f"{days[0]}"
    sources = "; ".join(dict.fromkeys(each.source for each in lists))
    table = tuple(
        gpu.model_copy(update=_both(prices.get(gpu.name, Prices()))) for gpu in all_gpus()
    )
    origin = f"{provider}'s list prices as published, checked {since} ({sources})"
    age = ((today or datetime.datetime.now(datetime.UTC).date()) - days[0]).days
    if age > _OLD:
        origin += f"; some are {age} days old: check them, and give your own with --prices"
    return PriceTable(table, prices.get(_CORE, Prices()).usd_per_hour, origin)


def _both(price: Prices) -> dict[str, float | None]:
    return {
        "usd_per_hour": price.usd_per_hour,
        "spot_usd_per_hour": price.spot_usd_per_hour,
    }


def find_gpu(name: str, gpus: Sequence[Gpu] | None = None) -> Gpu:
    """Find a GPU by name, as people or its driver write it ("NVIDIA H100 80GB HBM3").

    A MIG device has the GPU's name, and its profile: A100-80-MIG-1g.10gb.

    Raises:
        BadInput: no GPU has that name.
    """
    known = all_gpus() if gpus is None else gpus
    result = known_gpu(name, known)
    if result is not None:
        return result
    if part := _PART.fullmatch(name.lower()):
        return find_gpu(part["gpu"], known).part(part["profile"])
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
    gpus = [gpu for gpu in same if gpu.memory_gb == memory_gb]
    if len(gpus) == 1:
        return gpus[0]
    known = ", ".join(f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in gpus or same)
    amount = "several" if gpus else "no"
    raise BadInput(
        f"{name or 'a GPU'} with {memory_gb:g} GB: the plan's table has {amount} such GPU"
        + ("s" if gpus else ""),
        remedy=f"name one of {known}",
    )


def priced(prices: Path) -> PriceTable:
    """Return the table with prices only from a file; prices that it leaves out are unknown.

    Args:
        prices: YAML: a GPU's name, with `usd_per_hour` and `spot_usd_per_hour` below it. CPU is a
            core of a machine without GPUs.

    Raises:
        BadInput: the file can't be read, names a GPU that is not in the table, or one twice.
    """
    known, what = all_gpus(), f"--prices {prices}"
    given, names = dict[str, Prices](), dict[str, str]()
    text = read(prices, what, "give a YAML file of prices")
    for name, value in _read_prices(text, what).items():
        try:
            gpu = _CORE if _plain(name) == CPU else find_gpu(name, known).name
        except BadInput as error:
            message = f"{what}: {_line(text, name)}{error.message}"
            raise BadInput(message, remedy=error.remedy) from error
        if gpu in given:
            raise BadInput(
                f"{what}: {_line(text, name)}{names[gpu]} and {name} are the same device, {gpu}",
                remedy="give one price for it",
            )
        given[gpu], names[gpu] = value, name
    if given.get(_CORE, Prices()).spot_usd_per_hour is not None:
        raise BadInput(
            f"{what}: {_line(text, names[_CORE])}{names[_CORE]}.spot_usd_per_hour: a plan compares "
            "spot prices of GPUs only",
            remedy="leave it out, or give the spot price as usd_per_hour",
        )
    unknown = Prices()
    gpus = (gpu.model_copy(update=given.get(gpu.name, unknown).model_dump()) for gpu in known)
    return PriceTable(tuple(gpus), given.get(_CORE, unknown).usd_per_hour, str(prices))


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


def _slices(profile: str) -> tuple[int, int]:
    """Return how many slices a MIG profile has, and its memory in GB."""
    slices, memory = profile.removesuffix("gb").split("g.")
    return int(slices), int(memory)


def _divisible() -> list[str]:
    return [gpu.name for gpu in all_gpus() if gpu.mig]


def _plain(name: str) -> str:
    return re.sub(r"^nvidia|[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def _line(text: str, name: str) -> str:
    """Return which line of YAML has a key; "" if none has it at its start."""
    key = re.compile(rf"""\s*(["']?){re.escape(name)}\1\s*:""")
    lines = enumerate(text.splitlines(), start=1)
    return next((f"line {number}: " for number, line in lines if key.match(line)), "")


def _read_prices(text: str, what: str) -> Mapping[str, Prices]:
    content = parse(text, what)
    if unfit := next(find_unfit(content), None):
        raise BadInput(f"{what}: {unfit.field}: {unfit.message}", remedy=unfit.remedy)
    try:
        return _PRICES.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise BadInput(
            f"{what}: {_line(text, str([*first['loc'], ''][0]))}{where}: {first['msg']}",
            remedy="write it as `H100: {usd_per_hour: 8.00, spot_usd_per_hour: 3.20}`, one GPU "
            "per line",
        ) from error


def device_name(compute: ComputeConfig) -> str:
    """Return the name of the first GPU, such as "NVIDIA H100 80GB HBM3", or "cpu"."""
    if compute.device == CPU or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return CPU
    try:
        query = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return CPU
    return query.stdout.partition("\n")[0].strip() or CPU


def cores_of_rank(compute: ComputeConfig) -> float:
    """Return how many of this machine's cores a rank has."""
    return compute.threads_per_rank or len(os.sched_getaffinity(0)) / compute.nproc_per_node


def this_cpu(config: RunConfig, core: float | None = None) -> Gpu:
    """Return this machine's CPU in place of a GPU, with one rank's share of the free memory.

    Its speed is assumed from the cores of a rank, until a calibration measures it.

    Args:
        core: USD per hour for one; None if unknown.

    Raises:
        BadInput: as for `check_cuda_fields`.
    """
    check_cuda_fields(config)
    free = psutil.virtual_memory().available / config.compute.nproc_per_node
    cores = cores_of_rank(config.compute)
    peak = cores * _TFLOPS_OF_A_CORE
    speeds = {
        "speed": peak * _SUSTAINED / TFLOPS_OF_A_UNIT,
        "half_tflops": peak,
        "fp32_tflops": peak,
    }
    bf16 = multiplies_bfloat16(_CPUINFO)
    return Gpu(
        name=_CORE,
        memory_gb=round(free / 1e9, 2),
        bf16=bf16,
        cuda=False,
        usd_per_hour=None if core is None else core * cores,
        **speeds,
    )


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
