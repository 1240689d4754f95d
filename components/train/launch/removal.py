"""Removes a run's objects from a cluster, whichever process created them.

It does not use foreground deletion: a TrainJob that waits for its dependents sees its JobSet
disappear, and its controller (Trainer 2.0) then creates another one, whose pods start to train.
If the runtime goes first, a webhook rejects the update that would let the TrainJob end.
"""

from __future__ import annotations

import contextlib
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
    this_pod_name,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.lease import Generations, is_held
from steadytrain.components.shared.retry import retry
from steadytrain.components.shared.storage import LocalStorage, Storage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.launch.job import offered
from steadytrain.components.train.launch.naming import (
    MANAGED,
    PIPELINE_RUN,
    is_below,
    is_of,
    run_labels,
)
from steadytrain.components.train.launch.own_pod import termination

_LOOK_SECONDS = 0.3
_SUSPENDED_SECONDS = 75.0
"""How long a job's controller may take to suspend what it made for the job. Usually it takes less
than a second; after the API server was away, Trainer's cache lags by up to a minute."""
_SETTLED = {"Suspended", "Complete", "Failed"}
"""Conditions of a job that makes no pods."""


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


def nodes_of_pods(cluster: Cluster, run_id: str, attempts: Path) -> list[str]:
    """Return the names of the machines that still have pods of a run; see `remove_jobs`."""
    pods = cluster.list(POD, run_labels(run_id))
    nodes = (pod["spec"].get("nodeName") for pod in pods if is_of(pod, attempts))
    return sorted({name for name in nodes if name})


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
        left = retry(lambda: _objects(cluster, labels, belongs, awaited), wait=wait)
        new = [item for item in left if item[0] in kinds and item not in asked]
        _suspend(cluster, [item for item in new if item[0].suspendable], wait)
        for kind, name in new:
            retry(partial(cluster.delete, kind, name), wait=wait)
        asked.update(new)
        deadline = min(deadline, time.monotonic() + seconds)
        if not left or time.monotonic() >= deadline:
            return [name for _, name in left]
        wait(_LOOK_SECONDS)


def _suspend(
    cluster: Cluster, jobs: Sequence[tuple[Kind, str]], wait: Callable[[float], object]
) -> None:
    """Suspend jobs that will be deleted, and wait until their controller has noticed.

    A controller whose cache lags makes the objects of a deleted job once more, with pods, for
    which a cluster may even add nodes. It makes none for a suspended job. A job that cannot be
    suspended, for example because its runtime is gone, is deleted all the same.
    """
    waiting = []
    for kind, name in jobs:
        with contextlib.suppress(Refused, Unreachable):
            cluster.suspend(kind, name)
            waiting.append((kind, name))
    deadline = time.monotonic() + _SUSPENDED_SECONDS
    while waiting and time.monotonic() < deadline:
        with contextlib.suppress(Refused, Unreachable):
            waiting = [item for item in waiting if not _is_settled(cluster.get(*item))]
        if waiting:
            wait(_LOOK_SECONDS)


def _is_settled(job: Manifest | None) -> bool:
    conditions = (job or {}).get("status", {}).get("conditions") or []
    true = {item["type"] for item in conditions if item["status"] == "True"}
    return job is None or bool(_SETTLED & true)


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
    if not this_pod_name():
        return []
    seconds = config.recovery.lease_seconds
    try:
        cluster = connect()
        labels = {PIPELINE_RUN: job} if job and _how_terminated(cluster) else {}
        if not (labels or _lapses(lease, seconds)):
            return []
        kind = retry(lambda: offered(cluster, config.compute.launcher))
        if kind is None:
            return []
        return remove(cluster, kinds=kind.kinds, seconds=seconds, labels=labels)
    except (Unreachable, Refused) as error:
        return [str(error)]


def how_terminated() -> str:
    """Return how the pipeline run of this pod was terminated; "" if it was not, or if in doubt.

    In doubt, jobs are removed once the lease has expired.
    """
    if not this_pod_name():
        return ""
    try:
        return _how_terminated(connect())
    except (Unreachable, Refused):
        return ""


def _how_terminated(cluster: Cluster) -> str:
    try:
        return termination(cluster)
    except (Unreachable, Refused):
        return ""


def works_in(lease: Storage, job: str) -> bool:
    """Return whether the holder of a lease is a step of a pipeline run. In doubt, it is not.

    Args:
        job: KFP's id of the run.
    """
    generations = Generations(lease)
    holder = generations.holder(generations.last())
    if holder is None:
        return False
    try:
        cluster = connect()
        pods = retry(lambda: cluster.list(POD, {PIPELINE_RUN: job}))
    except (Unreachable, Refused):
        return False
    # A pod's host name is its own name, cut if it is too long.
    return any(pod["metadata"]["name"][: len(holder.host)] == holder.host for pod in pods)


def _lapses(lease: Storage, seconds: float) -> bool:
    """Return whether a lease is free, or expires within one lease period."""
    # is_held measures a silence from its first look.
    held, deadline = is_held(lease), time.monotonic() + seconds + _LOOK_SECONDS
    while held and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        held = is_held(lease)
    return not held


def _objects(
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
