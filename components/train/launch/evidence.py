"""What the cluster reports about a pod, as errors of its first rank and waiting times.

These are pure functions. The launcher knows the rank.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from steadytrain.components.shared.cluster import NOT_YET, Manifest
from steadytrain.components.shared.events.types import PodWaited
from steadytrain.components.train.attempt import RankError
from steadytrain.components.train.failures import CRASHES

_DENIED = re.compile(
    r"not found|manifest unknown|unauthori[sz]ed|denied|forbidden|authentication required"
    r"|no match for platform|invalid reference format",
    re.IGNORECASE,
)
_PULLING = {"ErrImagePull", "ImagePullBackOff"}
_NUMBERS = re.compile(r"\d+")
_POD_NAME = re.compile(r'(?<=\bpods )"[^"]*"')
"""In the message about a pod that was not created. Each try has another random name."""
_IMAGE = "image"
_WRONG = {
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
}
"""Reasons for a waiting container that don't resolve by themselves."""
_NO_IMAGE = (
    "set compute.pods.image to one that the nodes can pull, or add the registry's pull secret "
    "to the train step's pod"
)
_WRONG_POD = "fix what the message names, in compute.pods or in the namespace's policy"
_REFUSED_START = {"StartError", "ContainerCannotRun"}
_DISK_REMEDY = (
    "raise compute.pods.temporary_storage, or put the base model on the volume: models from a hub "
    "are downloaded to /tmp"
)
_OWN_DISK = re.compile(
    r"EmptyDir volume .* exceeds the limit|ephemeral(?: local)? storage .*limit", re.IGNORECASE
)
"""The kubelet's messages for a pod that exceeded its disk limit; a new pod would do so too."""
_KILLED = (137, 143)
"""Exit statuses after SIGKILL and SIGTERM."""
_CRASHED = {128 + number for number in CRASHES}
_NOT_CREATED = {"FailedCreate", "FailedCreatePod"}
"""Event reasons of the Kubernetes job controller and of the training operator."""
_OVER_QUOTA = re.compile(r"exceeded quota", re.IGNORECASE)
_FORBIDDEN = re.compile(r"is forbidden|denied the request|admission webhook|is invalid")


def lost(pod: Manifest) -> RankError | None:
    """Return why a pod ended or is about to; None while it runs or waits, or if it succeeded.

    Exceeded memory and disk limits come first, then a node that was taken away: how the containers
    ended is only a consequence of that.
    """
    name, status = pod["metadata"]["name"], pod["status"]
    ended = _terminated(pod)
    if ended and ended.get("reason") == "OOMKilled":
        return _evidence("OOMKilled", f"pod {name} ran out of its memory limit{_limit(pod)}", ended)
    if status.get("reason") == "Evicted" and _wrote_too_much(status.get("message", "")):
        text = f"pod {name} was evicted: {status['message'].strip()}"
        return RankError(kind="StorageError", message=text, remedy=_DISK_REMEDY)
    taken = _taken(status)
    if taken:
        return _evidence(*taken, ended, name)
    deleted = "deletionTimestamp" in pod["metadata"]
    if ended and not (deleted and ended["exitCode"] in _KILLED):
        well = ended["exitCode"] == 0
        text = f"pod {name} {_end(ended)}"
        return None if well else _evidence(_kind_of_end(ended), text, ended)
    if deleted:
        return _evidence("PodDeleted", f"pod {name} was deleted", None)
    if status.get("phase") == "Failed":
        text = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        return _evidence("NodeLost", f"pod {name} failed{': ' if text else ''}{text}", None)
    return None


def hopeless(pod: Manifest) -> RankError | None:
    """Return why a waiting pod will never start: its image or a setting of it is wrong."""
    for container, reason, message in _waiting(pod):
        if reason in _WRONG or (reason in _PULLING and _DENIED.search(message)):
            return _stuck(pod, container, "BadPod")
    return None


def unreachable(pod: Manifest) -> RankError | None:
    """Return why a pod's image cannot be pulled now, if its registry may answer later."""
    for container, reason, _ in _waiting(pod):
        if reason in _PULLING:
            return _stuck(pod, container, "PendingTimeout")
    return None


def why_pending(pod: Manifest) -> str:
    """Return what a pod is waiting for, in the cluster's words; "" if it does not say yet."""
    for condition in pod["status"].get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    for container in _containers(pod):
        waiting = container["state"].get("waiting")
        if waiting and waiting.get("message"):
            return f"{waiting['reason']}: {waiting['message']}"
    return ""


def same_wait(reason: str, before: str) -> bool:
    """Return whether a reason only repeats an earlier one.

    A registry's error and the back-off after it alternate; numbers of nodes and ports change, and
    so does the name of a pod that is over quota.
    """
    now, then = _essence(reason), _essence(before)
    # A back-off may not repeat its cause.
    return now == then or (now == _IMAGE and then.startswith(_IMAGE))


def refused(events: Sequence[Manifest]) -> RankError | None:
    """Return why no pod can be created, if admission rejects it permanently."""
    for message in _failed_to_create(events):
        if _FORBIDDEN.search(message) and not _OVER_QUOTA.search(message):
            return RankError(kind="BadPod", message=message, remedy=_WRONG_POD)
    return None


def why_absent(events: Sequence[Manifest]) -> str:
    """Return why no pod has been created so far; "" if nothing reports a reason."""
    return next(_failed_to_create(events), "") or next(
        (f"{item['reason']}: {item['message']}" for item in _warnings(events)), ""
    )


def is_waiting(pod: Manifest) -> bool:
    """Return whether its container has not started."""
    containers = pod["status"].get("containerStatuses") or []
    return not any({"running", "terminated"} & item["state"].keys() for item in containers)


def node_of(pod: Manifest) -> int:
    """Return a pod's node number, from the labels of Trainer's jobs or of the training operator."""
    metadata = pod["metadata"]
    index = metadata.get("annotations", {}).get("batch.kubernetes.io/job-completion-index")
    if index is not None:
        return int(index)
    return int(metadata["labels"]["training.kubeflow.org/replica-index"])


def _containers(pod: Manifest) -> Iterator[Manifest]:
    """Yield the states of a pod's containers, those that run before the others first."""
    for kind in ("initContainerStatuses", "containerStatuses"):
        yield from pod["status"].get(kind) or ()


def _waiting(pod: Manifest) -> Iterator[tuple[Manifest, str, str]]:
    """Yield the containers that wait, with reason and message. Leave out passing troubles."""
    for container in _containers(pod):
        waiting = container["state"].get("waiting") or {}
        message = waiting.get("message") or ""
        if waiting and not NOT_YET.search(message):
            yield container, waiting.get("reason") or "", message


def _stuck(pod: Manifest, container: Manifest, kind: str) -> RankError:
    waiting = container["state"]["waiting"]
    state = f"{waiting['reason']}: {waiting.get('message') or 'the cluster says no more'}"
    text = f"pod {pod['metadata']['name']}, image {container['image']}: {state}"
    remedy = _NO_IMAGE if "Image" in waiting["reason"] else _WRONG_POD
    return RankError(kind=kind, message=text, remedy=remedy)


def _essence(reason: str) -> str:
    kind, _, message = reason.partition(": ")
    if kind in _PULLING:
        # The last part is the cause, such as "no such host".
        _, tail, cause = message.rpartition(": ")
        return f"{_IMAGE}: {_NUMBERS.sub('#', cause)}" if tail else _IMAGE
    return _NUMBERS.sub("#", _POD_NAME.sub("#", reason))


def _wrote_too_much(message: str) -> bool:
    return _OWN_DISK.search(message) is not None and "shared-memory" not in message


def _taken(status: Manifest) -> tuple[str, str] | None:
    """Return the kind and a description if a pod was taken from its node."""
    reason, message = status.get("reason", ""), status.get("message", "")
    if reason == "Evicted":
        memory = "emptydir" in message.lower() and "shared-memory" in message
        return ("OOMKilled" if memory else "Evicted"), f"was evicted: {message}"
    if reason == "NodeLost":
        return "NodeLost", f"is on a node that is lost: {message}"
    for condition in status.get("conditions", []):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            why = condition.get("reason", "")
            kind = "NodeLost" if why == "DeletionByPodGC" else "Preempted"
            return kind, f"was removed from its node ({why}): {condition.get('message', '')}"
    if reason in ("Terminated", "NodeShutdown", "Preempting"):
        return "Preempted", f"was removed from its node ({reason}): {message}"
    return None


def _terminated(pod: Manifest) -> Manifest | None:
    for container in pod["status"].get("containerStatuses", []):
        result: Manifest | None = container["state"].get("terminated")
        if result:
            return result
    return None


def _kind_of_end(ended: Manifest) -> str:
    if ended.get("reason") in _REFUSED_START:
        return "BadPod"
    if ended["exitCode"] in _CRASHED:
        return "Crashed"
    # Killed from outside; the killer is unknown.
    return "AgentLost" if ended["exitCode"] in _KILLED else "AgentEnded"


def _end(ended: Manifest) -> str:
    text = ended.get("message", "").strip()
    what = f"ended with {ended.get('reason', 'Error')}, exit status {ended['exitCode']}"
    return f"{what}: {text}" if text else what


def _limit(pod: Manifest) -> str:
    limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return f" of {limits['memory']} (compute.pods.memory)" if "memory" in limits else ""


def _evidence(kind: str, message: str, ended: Manifest | None, pod: str = "") -> RankError:
    text = f"pod {pod} {message}" if pod else message
    return RankError(kind=kind, message=text.strip(), time=_ended_at(ended))


def _ended_at(ended: Manifest | None) -> float:
    finished = (ended or {}).get("finishedAt")
    return datetime.fromisoformat(finished).timestamp() if finished else time.time()


def _failed_to_create(events: Sequence[Manifest]) -> Iterator[str]:
    return (item["message"] for item in _warnings(events) if item["reason"] in _NOT_CREATED)


def _warnings(events: Sequence[Manifest]) -> Iterator[Manifest]:
    """Return warnings, newest first."""
    warnings = [item for item in events if item.get("type") == "Warning"]
    newest = sorted(warnings, key=lambda item: str(item.get("lastTimestamp")), reverse=True)
    return iter(newest)


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
