"""Trials whose ranks are in the pods of a cluster, as a study's driver uses them.

A trial is supervised by a process of its own next to the driver, as on one machine. Its ranks are a
job on the cluster, created, followed and removed as for any run. So a trial that pauses, ends or is
stopped frees its nodes at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from steadytrain.components.shared.cluster import Cluster, Refused, Unreachable
from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.quantities import duration
from steadytrain.components.train.launch.job import SLACK_SECONDS, Job
from steadytrain.components.train.launch.launcher import jobs_for
from steadytrain.components.train.launch.removal import remove_jobs_below
from steadytrain.components.tune.trials.base import Slot, Trials, TrialState
from steadytrain.components.tune.trials.folder import trials_of
from steadytrain.components.tune.trials.local import LINGER_SECONDS, LocalTrials, local_trials

STUDY: Final = "steadytrain.io/study"
"""Label of the jobs of a study's trials, with the study's name."""


def trials_for(
    study: Path, config: RunConfig, notify: Callable[[str], object], imports: Sequence[str]
) -> Trials:
    """Return the trials of a study: in pods if `compute.launcher` says so, or on this machine.

    Args:
        study: the study's folder. In pods, it must be on the volume that they share.
        config: of the study.
        notify: receives lines for people, such as why a trial on a cluster waits.
        imports: the modules that all trials on this machine share (`imports_of`).

    Raises:
        Unreachable: the cluster's API server does not answer.
    """
    found, parallel = jobs_for(config.compute), config.tune.budget.parallel
    if found is None:
        return local_trials(study, parallel=parallel, imports=imports)
    seconds = config.recovery.stop_grace_seconds + 2 * SLACK_SECONDS
    return ClusterTrials(study, parallel, *found, seconds, notify)


@dataclass(frozen=True)
class RanksInPods:
    """Ranks in pods. Only their supervisors are on this machine."""

    parallel: int
    imports: ClassVar[Sequence[str]] = (
        "kubernetes.client",
        "kubernetes.config",
        "steadytrain.components.train.launch.pods",
    )

    def threads(self, _: ComputeConfig) -> None:
        return None

    def slots(self, _: ComputeConfig) -> list[Slot]:
        return [Slot(threads=1)] * self.parallel


class ClusterTrials:
    """Implements `Trials` with jobs on a cluster.

    If the driver's pod is lost, the ranks of its trials stop with a checkpoint once they notice
    that nobody supervises them. The next driver removes their jobs before it continues them.

    Args:
        job: the kind of job.
        seconds: how long jobs have to end once they are deleted.
    """

    def __init__(
        self,
        study: Path,
        parallel: int,
        cluster: Cluster,
        job: type[Job],
        seconds: float,
        notify: Callable[[str], object],
    ) -> None:
        self.study = Path(os.path.abspath(study))  # noqa: PTH100  links stay as they are
        self.cluster, self.job, self.seconds, self.notify = cluster, job, seconds, notify
        self._supervised = LocalTrials(
            self.study, parallel, LINGER_SECONDS, RanksInPods(parallel), notify
        )

    def train(self, number: int, config: RunConfig, until: int) -> None:
        self._supervised.train(number, _labeled(config, self.study.name), until)

    def state(self, number: int) -> TrialState:
        return self._supervised.state(number)

    def stop(self, number: int, *, within: float = math.inf) -> None:
        self._supervised.stop(number, within=within)

    def memory(self, number: int) -> int:
        return self._supervised.memory(number)

    def discard(self, number: int) -> None:
        self._supervised.discard(number)

    def attach(self) -> frozenset[int]:
        alive = self._supervised.attach()
        if not alive:
            self._remove_jobs()
        return alive

    def close(self, *, within: float = math.inf) -> None:
        try:
            self._supervised.close(within=within)
        finally:
            self._remove_jobs()

    def _remove_jobs(self) -> None:
        """Remove the jobs of all trials, none of which is supervised any more."""
        try:
            left = remove_jobs_below(
                self.cluster, trials_of(self.study), self.job.kinds, seconds=self.seconds
            )
        except (Unreachable, Refused) as error:
            left = [error.message]
        if left:
            # Their agents end with the lease. The exit handler or the next driver removes them.
            self.notify(f"not removed within {duration(self.seconds)}: {', '.join(left)}")


def _labeled(config: RunConfig, study: str) -> RunConfig:
    """Return the configuration of a trial whose jobs have the study's label."""
    pods = config.compute.pods
    pods = pods.model_copy(update={"labels": pods.labels | {STUDY: study}})
    compute = config.compute.model_copy(update={"pods": pods})
    return config.model_copy(update={"compute": compute})
