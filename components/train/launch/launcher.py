"""What starts a run's ranks: the interface, and the choice between this machine and pods."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from steadytrain.components.shared.cluster import Cluster, connect, this_pod_name
from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.retry import retry
from steadytrain.components.train.agent.fork_server import ForkServer
from steadytrain.components.train.attempt import AttemptFolder
from steadytrain.components.train.launch.job import Job, offered
from steadytrain.components.train.launch.pods import PodsLauncher
from steadytrain.components.train.launch.process import RANK_IMPORTS, RANK_PROGRAM, ProcessLauncher


class RunningAttempt(Protocol):
    """The ranks of one attempt."""

    def poll(self) -> bool:
        """Return whether all ranks have exited or are lost; then the attempt's folder says why."""

    def stop(self, grace_seconds: float) -> None:
        """Ask every rank to exit (SIGTERM, then SIGKILL after the grace period); return at once.

        A later call with a shorter grace period shortens the first one.
        """

    def exits(self) -> Mapping[int, int]:
        """Return the exit status by rank (negative: a signal), the earliest failure first.

        Successful ranks may be missing. Empty if nothing is left to report.
        """


class Launcher(Protocol):
    """Starts attempts."""

    @property
    def world_size(self) -> int:
        """The number of ranks in each attempt."""

    @property
    def device(self) -> str:
        """The device that they compute on: the name of a GPU, or "cpu"."""

    @property
    def host_memory(self) -> int:
        """Bytes of host memory that the ranks of one node may use."""

    def start(self, folder: AttemptFolder) -> AbstractContextManager[RunningAttempt]:
        """Start the ranks specified in the attempt's folder.

        However the context exits, no process of the attempt remains.
        """


@contextlib.contextmanager
def launcher_for(
    config: RunConfig,
    program: Sequence[str] = RANK_PROGRAM,
    imports: Sequence[str] = RANK_IMPORTS,
    agent: ForkServer | None = None,
) -> Iterator[Launcher]:
    """Return the launcher that `compute.launcher` names, or that fits the environment.

    Args:
        program: command of a rank; the attempt's folder is appended to it.
        imports: modules that it imports.
        agent: of this machine, if there is one already; see `ProcessLauncher`.

    Raises:
        BadInput: several nodes, but no cluster here; or no image or volume for pods.
        Unreachable: the cluster's API server does not answer.
        Refused: this pod's service account may not read its own pod.
    """
    compute, jobs = config.compute, jobs_for(config.compute)
    if jobs is not None:
        yield retry(lambda: PodsLauncher(config, *jobs, program))
    elif compute.nodes > 1:
        raise BadInput(
            f"compute.nodes = {compute.nodes}: there is only one machine here",
            remedy="run it as a step of a pipeline on a cluster with Kubeflow Trainer, or set "
            "compute.nproc_per_node instead",
        )
    else:
        with ProcessLauncher(compute, program, imports, agent) as process:
            yield process


def jobs_for(compute: ComputeConfig) -> tuple[Cluster, type[Job]] | None:
    """Return the cluster in whose pods ranks run, and the kind of their jobs.

    Returns:
        None if ranks run on this machine: as configured, or because this is not a step on a
        cluster, or the cluster has no kind of training job.

    Raises:
        Unreachable: the cluster's API server does not answer.
    """
    if compute.launcher == "process" or (compute.launcher == "auto" and not this_pod_name()):
        return None
    cluster = connect()
    job = retry(lambda: offered(cluster, compute.launcher))
    return (cluster, job) if job else None
