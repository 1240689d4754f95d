"""How the trials that train at once divide this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import Record
from steadytrain.components.sizing.hardware import CPU, device_name
from steadytrain.components.train.agent.ranks import threads_of_each
from steadytrain.components.train.launch.process import RANK_IMPORTS

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")


class Slot(Record):
    """One trial's share of the machine.

    threads: CPU threads of each of its ranks.
    gpus: its GPUs, one per rank, as CUDA_VISIBLE_DEVICES names them; empty on a CPU.
    """

    threads: int
    gpus: tuple[str, ...] = ()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for the trial's processes."""
        return {"OMP_NUM_THREADS": str(self.threads), _VISIBLE: ",".join(self.gpus)}


class Ranks(Protocol):
    """Where the ranks of trials run.

    imports: the modules that the processes of trials share.
    """

    imports: ClassVar[Sequence[str]]

    def threads(self, compute: ComputeConfig) -> int | None:
        """Return the CPU threads of each rank; None if ranks are not on this machine."""

    def slots(self, compute: ComputeConfig) -> list[Slot]:
        """Return a slot on this machine for each of the trials that train at once.

        Raises:
            BadInput: this machine has too few GPUs.
        """


@dataclass(frozen=True)
class RanksHere:
    """Ranks on this machine, which `parallel` trials divide among them."""

    parallel: int
    imports: ClassVar[Sequence[str]] = RANK_IMPORTS

    def threads(self, compute: ComputeConfig) -> int:
        return threads_of_rank(compute, self.parallel)

    def slots(self, compute: ComputeConfig) -> list[Slot]:
        return divide(compute, self.parallel)


def threads_of_rank(compute: ComputeConfig, parallel: int) -> int:
    """Return the CPU threads of each rank of the trials that train at once."""
    return threads_of_each(parallel * compute.nproc_per_node, compute.threads_per_rank)


def divide(compute: ComputeConfig, parallel: int) -> list[Slot]:
    """Return a slot for each of the trials that train at once.

    Raises:
        BadInput: there are fewer GPUs than ranks, or trials cannot be on one machine.
    """
    if compute.nodes > 1:
        raise BadInput(
            f"compute.nodes = {compute.nodes}: trials on this machine have one node each",
            remedy="set compute.nodes to 1, or tune on a cluster",
        )
    ranks, threads = compute.nproc_per_node, threads_of_rank(compute, parallel)
    if device_name(compute) == CPU:
        return [Slot(threads=threads)] * parallel
    gpus = _gpus()
    if len(gpus) < parallel * ranks:
        raise BadInput(
            f"parallel = {parallel}: with compute.nproc_per_node = {ranks} that needs "
            f"{parallel * ranks} GPUs, and this machine has {len(gpus)}",
            remedy=f"train {max(1, len(gpus) // ranks)} trials at once",
        )
    return [
        Slot(threads=threads, gpus=gpus[number * ranks : (number + 1) * ranks])
        for number in range(parallel)
    ]


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        found = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True)
        return tuple(found.stdout.split())
    return tuple(filter(None, (name.strip() for name in visible.split(","))))
