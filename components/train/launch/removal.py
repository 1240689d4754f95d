"""Removing what a run has on a cluster, whoever left it there.

Not in the foreground: a TrainJob that waits there for what it owns sees its JobSet go
and, its controller being as it is (Trainer 2.0), makes another, whose pods begin to train;
and where its runtime goes first, a webhook refuses the update that would let it end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from steadytrain.components.shared.cluster import (
    POD,
    Cluster,
    Kind,
    Refused,
    Unreachable,
    connect,
    own_pod_name,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.patience import patiently
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.kinds import offered
from steadytrain.components.train.launch.naming import PIPELINE_RUN, is_of, run_labels
from steadytrain.components.train.launch.termination import is_terminated
from steadytrain.components.train.lease import held

_LOOK_SECONDS = 0.3


def remove_jobs(
    cluster: Cluster,
    run_id: str,
    attempts: Path,
    kinds: Sequence[Kind],
    *,
    seconds: float,
    pods: bool = True,
    labels: Mapping[str, str] = MappingProxyType({}),
    wait: Callable[[float], object] = time.sleep,
) -> list[str]:
    """Deletes every job of a run, and waits until they are gone.

    Asked for first and waited for then: who has no time to wait has asked all the same.

    Args:
        attempts: the folder of the run's attempts, which tells it from another of its name.
        kinds: what is made for an attempt.
        pods: whether their pods are waited for too.
        labels: that they bear besides.
        seconds: to wait for their end at most; the API server's answer is waited for besides.

    Returns:
        Names of what is still there when the time is up: what a dead kubelet holds on to, say.

    Raises:
        Unreachable: the API server does not answer.
        Refused: it forbids it.
    """
    asked, awaited = set[tuple[Kind, str]](), (*kinds, POD) if pods else kinds
    borne = {**run_labels(run_id), **labels}
    deadline = float("inf")
    while True:
        left = patiently(lambda: _of_run(cluster, borne, attempts, awaited), wait=wait)
        for kind, name in left:
            if kind in kinds and (kind, name) not in asked:
                patiently(partial(cluster.delete, kind, name), wait=wait)
                asked.add((kind, name))
        deadline = min(deadline, time.monotonic() + seconds)
        if not left or time.monotonic() >= deadline:
            return [name for _, name in left]
        wait(_LOOK_SECONDS)


def remove_unfinished(config: RunConfig, job: str = "") -> list[str]:
    """What the exit handler does: removes the jobs of a run whose train step was lost.

    Where a supervisor still renews its lease after the time of one, it is at work, as when
    the run was started again meanwhile; its job is then left alone.

    Args:
        job: KFP's id of its run; where that was terminated, jobs that it has started go at once.

    Returns:
        What could not be removed, in words; a run that is not on a cluster has nothing.
    """
    workspace, lease = Workspace.of(config), config.recovery.lease_seconds
    if not own_pod_name():
        return []
    try:
        cluster = connect()
        labels = {PIPELINE_RUN: job} if job and _surely_terminated(cluster) else {}
        if not (labels or _lapses(workspace, lease)):
            return []
        kind = patiently(lambda: offered(cluster, config.compute.launcher))
        if kind is None:
            return []
        return remove_jobs(
            cluster,
            config.run_id,
            workspace.attempts,
            kind.kinds,
            seconds=lease,
            labels=labels,
        )
    except (Unreachable, Refused) as error:
        return [str(error)]


def _surely_terminated(cluster: Cluster) -> bool:
    """In doubt it is not, and jobs are removed when the lease has lapsed."""
    try:
        return is_terminated(cluster)
    except (Unreachable, Refused):
        return False


def _lapses(workspace: Workspace, seconds: float) -> bool:
    """Whether nobody holds the run, or is heard of for the time of a lease."""
    deadline = time.monotonic() + seconds
    while held(LocalStorage(workspace.lease)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _of_run(
    cluster: Cluster, labels: Mapping[str, str], attempts: Path, kinds: Sequence[Kind]
) -> list[tuple[Kind, str]]:
    return [
        (kind, item["metadata"]["name"])
        for kind in kinds
        for item in cluster.list(kind, labels)
        if is_of(item, attempts)
    ]
