"""What a study's driver needs of whatever runs its trials, and how trials divide a machine."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import Record
from steadytrain.components.sizing.hardware import CPU, device_name
from steadytrain.components.tasks.base import Late, load_task
from steadytrain.components.train.agent.ranks import threads_of_each
from steadytrain.components.train.launch.process import RANK_IMPORTS
from steadytrain.components.train.step import load_trainer

Condition = Literal["new", "running", "paused", "finished", "failed"]
"""new: never started. paused: stopped at its cut or killed, with a checkpoint, perhaps that of its
last step. finished: reached the end of its schedule, or stopped early. failed: recovery gave up."""


@dataclass(frozen=True)
class Validation:
    """A validation of a trial.

    step: optimizer steps done.
    metrics: the value of each validation metric by name.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class TrialState:
    """What is known about a trial from its own files.

    step: optimizer steps done and saved or, for a running trial, reported.
    validations: all of them, by step; each step once, whatever was repeated after a failure.
    seconds: time spent training, over all processes that worked on the trial.
    failure: class of the failure that ended the trial (see docs/reference/failures), or "".
    error: the failure's message, or "".
    fallbacks: OOM fallbacks that were applied, by name.
    latency_ms: milliseconds of the exported model for one sequence; None if they were not measured.
    since_prepared: of a running trial, seconds since it first had its data and a process; None
        before that.
    """

    condition: Condition
    step: int = 0
    validations: tuple[Validation, ...] = ()
    seconds: float = 0.0
    failure: str = ""
    error: str = ""
    fallbacks: tuple[str, ...] = ()
    latency_ms: float | None = None
    since_prepared: float | None = None

    def at(self, until: int) -> TrialState:
        """Return the state in which a trial paused at a step that it has passed; else its state.

        A log that lost its last records is behind its trials.
        """
        steps = [self.step, *(item.step for item in self.validations)]
        if self.condition == "running" or max(steps) <= until:
            return self
        before = tuple(item for item in self.validations if item.step <= until)
        return TrialState("paused", until, before, self.seconds, fallbacks=self.fallbacks)


class Trials(Protocol):
    """The trials of one study. A trial is identified by its number, from 0.

    Every method may be called again after the driver died, and by another process than before.
    """

    def warm_up(self, compute: ComputeConfig) -> None:
        """Begin the imports that trials share, while the driver has other work.

        Raises:
            BadInput: the machine has too few GPUs for the trials.
        """

    def train(self, number: int, config: RunConfig, until: int) -> None:
        """Train a trial until a step in the background. Do nothing if that is already going on.

        A discarded trial has no checkpoint: it begins again, unless it ended or has that step.

        Args:
            config: the trial's complete configuration, always the same for one number. The trial
                is an ordinary run, and its schedule is that of the whole run: `until` cuts it and
                does not shorten it.
            until: optimizer steps; a multiple of `training.eval_steps`, or the last step.
        """

    def state(self, number: int) -> TrialState:
        """Return what is known about a trial. Cheap enough to call several times a second."""

    def stop(self, number: int, *, within: float = math.inf) -> None:
        """End the processes of a trial, which keeps its checkpoint. Return when they are gone.

        Args:
            within: seconds after which they are killed, if they have not saved it by then.
        """

    def memory(self, number: int, most: float) -> int:
        """Return the bytes that a trial's processes on this machine take; 0 if it has none.

        Args:
            most: that they may take. Below it, the number may be too high: what processes share
                may count several times.
        """

    def discard(self, number: int) -> None:
        """Remove everything of a trial except what `state` and its learning curve need."""

    def attach(self) -> frozenset[int]:
        """Return the trials that processes of an earlier driver are still training.

        They count as this driver's own from now on. Processes that cannot be taken over are ended
        first. Call this once, before anything else.
        """

    def close(self, *, within: float = math.inf) -> None:
        """End all processes, whose trials keep their checkpoints.

        Args:
            within: as for `stop`.
        """


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
    """The place where the ranks of trials run.

    imports: the modules that the processes of trials share.
    """

    @property
    def imports(self) -> Sequence[str]: ...

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
    imports: Sequence[str] = RANK_IMPORTS

    def threads(self, compute: ComputeConfig) -> int:
        return threads_of_rank(compute, self.parallel)

    def slots(self, compute: ComputeConfig) -> list[Slot]:
        return divide(compute, self.parallel)


def imports_of(config: RunConfig, *, scored: bool) -> list[str]:
    """Return the modules that the trials of a study on this machine share.

    Args:
        scored: whether each trial holds out a fold, and scores it.
    """
    result = [*getattr(load_trainer(config.model.framework), "imports", RANK_IMPORTS)]
    if scored:
        # Every fold is prepared, by the first trial that holds it out.
        result += [
            "steadytrain.components.preprocess.step",
            "steadytrain.components.evaluate.scoring",
        ]
        if isinstance(scorer := load_task(config.data.task).scorer, Late):
            result.append(scorer.address.partition(":")[0])
    return result


def threads_of_rank(compute: ComputeConfig, parallel: int) -> int:
    """Return the CPU threads of each rank of the trials that train at once."""
    return threads_of_each(parallel * compute.nproc_per_node, compute.threads_per_rank)


def most_at_once(compute: ComputeConfig) -> int:
    """Return how many trials this machine can train at once, each on cores or GPUs of its own."""
    if device_name(compute) == CPU:
        return max(1, len(os.sched_getaffinity(0)) // compute.nproc_per_node)
    return max(1, len(_gpus()) // compute.nproc_per_node)


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
        query = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60, check=True)
        return tuple(query.stdout.split())
    return tuple(filter(None, (name.strip() for name in visible.split(","))))
