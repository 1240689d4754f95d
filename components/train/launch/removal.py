"""Removes a run's objects from a cluster, whichever process created them.

It does not use foreground deletion: a TrainJob that waits for its dependents sees its JobSet
disappear, and its controller (Trainer 2.0) then creates another one, whose pods start to train.
If the runtime goes first, a webhook rejects the update that would let the TrainJob end.
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
    Manifest,
    Refused,
    Unreachable,
    connect,
    own_pod_name,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.patience import patiently
from steadytrain.components.shared.storage import LocalStorage, Storage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.kinds import offered
from steadytrain.components.train.launch.naming import (
    MANAGED,
    PIPELINE_RUN,
    is_below,
    is_of,
    run_labels,
)
from steadytrain.components.train.launch.own_pod import is_terminated
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
    """Delete every job of a run, and wait until they are gone.

    Requests every deletion before it waits, so a caller without time to wait still deletes.

    Args:
        attempts: the folder of the run's attempts, which tells it apart from another run of the
            same name.
        kinds: the objects that an attempt creates.
        pods: whether to wait for their pods too.
        labels: further labels that they must have.
        seconds: maximum wait for their end, not counting the API server's replies.

    Returns:
        Names of what remains when the time is up, for example objects held by a dead kubelet.

    Raises:
        Unreachable: the API server does not answer.
        Refused: the API server denies it.
    """
    return _remove(
        cluster,
        {**run_labels(run_id), **labels},
        lambda item: is_of(item, attempts),
        kinds,
        seconds=seconds,
        pods=pods,
        wait=wait,
    )


def remove_jobs_below(
    cluster: Cluster,
    folder: Path,
    kinds: Sequence[Kind],
    *,
    seconds: float,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Delete every job of the runs in a folder, at any depth. See `remove_jobs`."""
    return _remove(
        cluster,
        {**MANAGED, **labels},
        lambda item: is_below(item, folder),
        kinds,
        seconds=seconds,
    )


def _remove(
    cluster: Cluster,
    labels: Mapping[str, str],
    belongs: Callable[[Manifest], bool],
    kinds: Sequence[Kind],
    *,
    seconds: float,
    pods: bool = True,
    wait: Callable[[float], object] = time.sleep,
) -> list[str]:
    asked, awaited = set[tuple[Kind, str]](), (*kinds, POD) if pods else kinds
    deadline = float("inf")
    while True:
        left = patiently(lambda: _found(cluster, labels, belongs, awaited), wait=wait)
        for kind, name in left:
            if kind in kinds and (kind, name) not in asked:
                patiently(partial(cluster.delete, kind, name), wait=wait)
                asked.add((kind, name))
        deadline = min(deadline, time.monotonic() + seconds)
        if not left or time.monotonic() >= deadline:
            return [name for _, name in left]
        wait(_LOOK_SECONDS)


def remove_unfinished(config: RunConfig, job: str = "") -> list[str]:
    """Remove the jobs of a run whose train step was lost; called by the exit handler.

    If a supervisor still renews its lease after one lease period, the run is active, for example
    because it was restarted meanwhile. Its job is then left alone.

    Args:
        job: KFP's run id. If that run was terminated, the jobs that it started are removed at once.

    Returns:
        What could not be removed, in words; empty if the run is not on a cluster.
    """
    workspace = Workspace.of(config)
    return _remove_lost(
        config,
        job,
        LocalStorage(workspace.lease),
        partial(remove_jobs, run_id=config.run_id, attempts=workspace.attempts),
    )


def remove_unfinished_below(
    config: RunConfig, folder: Path, lease: Storage, job: str = ""
) -> list[str]:
    """Remove the jobs of the runs in a folder whose common supervisor was lost.

    Args:
        config: says which kind of jobs they are.
        lease: of the supervisor.
        job: as for `remove_unfinished`.
    """
    return _remove_lost(config, job, lease, partial(remove_jobs_below, folder=folder))


def _remove_lost(
    config: RunConfig, job: str, lease: Storage, remove: Callable[..., list[str]]
) -> list[str]:
    if not own_pod_name():
        return []
    seconds = config.recovery.lease_seconds
    try:
        cluster = connect()
        labels = {PIPELINE_RUN: job} if job and _surely_terminated(cluster) else {}
        if not (labels or _lapses(lease, seconds)):
            return []
        kind = patiently(lambda: offered(cluster, config.compute.launcher))
        if kind is None:
            return []
        return remove(cluster, kinds=kind.kinds, seconds=seconds, labels=labels)
    except (Unreachable, Refused) as error:
        return [str(error)]


def _surely_terminated(cluster: Cluster) -> bool:
    """Return False if in doubt: jobs are then removed once the lease has expired."""
    try:
        return is_terminated(cluster)
    except (Unreachable, Refused):
        return False


def _lapses(lease: Storage, seconds: float) -> bool:
    """Return whether a lease is free, or expires within one lease period."""
    deadline = time.monotonic() + seconds
    while held(lease):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _found(
    cluster: Cluster,
    labels: Mapping[str, str],
    belongs: Callable[[Manifest], bool],
    kinds: Sequence[Kind],
) -> list[tuple[Kind, str]]:
    return [
        (kind, item["metadata"]["name"])
        for kind in kinds
        for item in cluster.list(kind, labels)
        if belongs(item)
    ]
