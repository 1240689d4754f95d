"""How long a pod waited for what, from the conditions of its job and its own."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from steadytrain.components.shared.cluster import Manifest
from steadytrain.components.shared.events.types import PodWaited


def pod_waited(attempt: int, node: int, job: Manifest | None, pod: Manifest | None) -> PodWaited:
    """Return what is known about the waits of a node.

    A queue (Kueue) suspends a job until it admits it. A job that was never suspended is admitted
    when its pod is created.

    Args:
        job, pod: as the API server returns them; None if there is none.
    """
    created = _created(job) or _created(pod)
    admitted = _since(job, "Suspended", "False") or _created(pod)
    return PodWaited(
        attempt=attempt,
        node=node,
        created=created,
        admitted=max(created, admitted) if admitted else 0.0,
        scheduled=_since(pod, "PodScheduled", "True"),
        started=_started(pod),
    )


def _created(manifest: Manifest | None) -> float:
    return _seconds(manifest["metadata"].get("creationTimestamp")) if manifest else 0.0


def _since(manifest: Manifest | None, kind: str, status: str) -> float:
    """Return since when a condition holds; 0 if it does not."""
    conditions = (manifest or {}).get("status", {}).get("conditions") or []
    for condition in conditions:
        if (condition["type"], condition["status"]) == (kind, status):
            return _seconds(condition.get("lastTransitionTime"))
    return 0.0


def _started(pod: Manifest | None) -> float:
    for container in (pod or {}).get("status", {}).get("containerStatuses") or []:
        for state in ("running", "terminated"):
            if since := _seconds(container["state"].get(state, {}).get("startedAt")):
                return since
    return 0.0


def _seconds(time: Any) -> float:
    return datetime.fromisoformat(time).timestamp() if time else 0.0
