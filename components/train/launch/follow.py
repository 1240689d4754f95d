"""Watches a job's pods and writes what the cluster reports to the attempt's folder."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from steadytrain.components.shared import retry
from steadytrain.components.shared.cluster import (
    EVENT,
    POD,
    Cluster,
    Kind,
    Manifest,
    Refused,
    Unreachable,
)
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.events.types import PodsPending, PodWaited
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.storage.local import Awaited
from steadytrain.components.train.attempt import AttemptFolder, RankError
from steadytrain.components.train.launch.evidence import (
    hopeless,
    is_waiting,
    lost,
    node_of,
    pod_waited,
    refused,
    same_wait,
    unreachable,
    why_absent,
    why_pending,
)
from steadytrain.components.train.launch.job import Job
from steadytrain.components.train.launch.naming import ATTEMPT, FOLDER, GENERATION, RUN
from steadytrain.components.train.launch.removal import remove_jobs

LOOK_SECONDS = 1.5
_REMOVAL_SECONDS = 20.0
"""Time for controllers to remove what was just deleted."""
_TOLD_BY_AGENTS: Final = {"AgentEnded", "AgentLost", "NodeLost"}
"""Kinds of evidence to ignore if a node's agent reported how its ranks ended."""


class JobFollower(threading.Thread):
    """Creates a job and watches its pods until it is asked to end.

    The attempt's folder shows what the ranks do, so a training run needs no API server while it
    runs. While the server is unreachable, nothing is concluded. A server that denies what it
    allowed before gets time to recover.

    Args:
        notify: receives what the pods wait for, each time that the reason changes.
        note: receives how long each pod waited, once it has started or is lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        folder: AttemptFolder,
        notify: Callable[[PodsPending], object],
        note: Callable[[PodWaited], object] = lambda _: None,
    ) -> None:
        super().__init__(name=f"job-{job.name}", daemon=True)
        self.cluster, self.job, self.folder = cluster, job, folder
        self.notify, self.note = notify, note
        self.gone: set[int] = set()
        """Nodes that are lost, have ended, or will never start."""
        self.succeeded: set[int] = set()
        self.started: set[int] = set()
        self.ending = threading.Event()
        self._seen: dict[int, Manifest] = {}
        self._noted: set[int] = set()
        self._since = time.monotonic()
        self._cleared = False
        self._reasons: dict[int, str] = {}
        self._pulling: dict[int, float] = {}
        self._reported = ""
        self._retry = retry.Retry(
            seconds=retry.FOREVER,
            denied_seconds=retry.AWAY_SECONDS,
            delays=(LOOK_SECONDS, LOOK_SECONDS),
            wait=self._pause,
        )

    def run(self) -> None:
        try:
            self.make()
            self._since = time.monotonic()
            while not self.ending.is_set():
                self._retry(self.look)
                self.ending.wait(LOOK_SECONDS)
        except (Refused, Unreachable) as error:
            kind = "BadPod" if isinstance(error, Refused) else "Unreachable"
            self._lose_all(RankError(kind=kind, message=error.message, remedy=error.remedy))
        except Exception as error:
            # Otherwise nothing would watch the pods, and a missing pod would be waited for forever.
            self._lose_all(RankError.of(error))

    def end(self) -> None:
        """Ask the thread to end, and wait until it has."""
        self.ending.set()
        self.join()

    def make(self) -> None:
        """Create the job as soon as the cluster can."""
        retry.retry(self._create, wait=self._pause)

    def look(self) -> None:
        """Check the pods once and act on what is found."""
        result = sorted(self.cluster.list(POD, self.job.labels), key=_born)
        pods = {node_of(pod): pod for pod in result if self._is_ours(pod)}
        for node in self._nodes():
            self._judge(node, pods.get(node))
        self._seen |= pods
        for node in (self.gone | self.started) - self._noted:
            self._note(node)
        if self._reported and self.started.issuperset(self._nodes()):
            self._report_pending("")

    def _judge(self, node: int, pod: Manifest | None) -> None:
        before = self._seen.get(node)
        if pod is None and before is None:
            self._wait_for(node)
        elif pod is None or (before and _uid(pod) != _uid(before)):
            name = (before or {})["metadata"]["name"]
            self._lose(node, RankError(kind="PodDeleted", message=f"pod {name} was deleted"))
        elif why := lost(pod):
            self._lose(node, why)
        elif pod["status"].get("phase") == "Succeeded":
            self.succeeded.add(node)
            self.gone.add(node)
        elif is_waiting(pod):
            self._wait_with(node, pod)
        else:
            self.started.add(node)

    def _wait_with(self, node: int, pod: Manifest) -> None:
        """Handle a pod that has not started."""
        waited, reason = time.monotonic() - self._since, why_pending(pod)
        self._report(node, reason)
        if why := hopeless(pod) or self._gave_up_pulling(node, pod):
            self._lose(node, why)
        elif waited > self._limit:
            reason = reason or why_absent(self._events(pod["metadata"]["name"]))
            self._lose(node, self._late(f"pod {pod['metadata']['name']}", reason))

    def _gave_up_pulling(self, node: int, pod: Manifest) -> RankError | None:
        """Return why a pod has no image, if its registry has not answered for too long.

        All attempts in a row together wait as long as for a node. The kubelet keeps trying.
        """
        why = unreachable(pod)
        if why is None:
            return None
        since = self._pulling.setdefault(node, time.monotonic())
        limit = self._limit / self.job.recovery.max_failures_per_class
        return why if time.monotonic() - since > limit else None

    def _wait_for(self, node: int) -> None:
        """Handle a pod that has not been created."""
        waited = time.monotonic() - self._since
        if waited < 2 * LOOK_SECONDS:
            return
        events = [event for name in self.job.sources() for event in self._events(name)]
        reason = why_absent(events)
        self._report(node, reason)
        if why := refused(events):
            self._lose(node, why)
        elif self.cluster.get(self.job.kinds[0], self.job.name) is None:
            gone = f"{self.job.kinds[0].name} {self.job.name} was deleted"
            self._lose(node, RankError(kind="PodDeleted", message=gone))
        elif waited > self._limit:
            self._lose(node, self._late(f"the pod of node {node}", reason))

    @property
    def _limit(self) -> float:
        return self.job.pods.pending_timeout_seconds

    def _late(self, what: str, reason: str) -> RankError:
        return RankError(
            kind="PendingTimeout",
            message=f"{what} did not start within {duration(self._limit)} "
            f"(compute.pods.pending_timeout_seconds){': ' if reason else ''}{reason}",
            remedy="request less (compute.nodes, compute.pods), wait until there is capacity, or "
            "raise compute.pods.pending_timeout_seconds",
        )

    def _lose(self, node: int, why: RankError) -> None:
        """Write the reason to the folder, unless the node's agent already reported one."""
        if node in self.gone:
            return
        node_folder = self.folder.node(node)
        if not Awaited(node_folder.exits).there() or why.kind not in _TOLD_BY_AGENTS:
            first = node * self.job.compute.nproc_per_node
            why.model_copy(update={"rank": first}).save(node_folder.error)
        self.gone.add(node)

    def _lose_all(self, why: RankError) -> None:
        if self.ending.is_set():
            return
        for node in self._nodes():
            self._lose(node, why)

    def _create(self) -> None:
        """Create the job and its objects.

        If the reply to an earlier call was lost, what it created is adopted. Objects of an earlier
        supervisor are removed first. Their pods are not waited for, because that would take forever
        on a dead node. Their agents gave up when that supervisor's lease expired, and anything that
        they wrote after this one took over is ignored.
        """
        if not self._cleared:
            remove_jobs(
                self.cluster,
                self.job.labels[RUN],
                self.folder.path.parent,
                self.job.kinds,
                seconds=_REMOVAL_SECONDS,
                pods=False,
                wait=self._pause,
            )
            self._cleared = True
        for kind, manifest in self.job.manifests():
            self._make(kind, manifest)

    def _make(self, kind: Kind, manifest: Manifest) -> None:
        try:
            self.cluster.create(kind, manifest)
        except Refused as error:
            if error.reason == "AlreadyExists":
                self._recognise(kind, manifest, error)
            elif f'"{self.job.name}" not found' in error.message:
                # Trainer's webhook does not know the new runtime yet: its cache lags, by up to a
                # minute after the API server was away (58 s measured).
                raise Unreachable(error.message, remedy=error.remedy) from error
            else:
                raise

    def _recognise(self, kind: Kind, manifest: Manifest, error: Refused) -> None:
        """Raise if an existing object belongs to another run."""
        there = self.cluster.get(kind, self.job.name)
        if there and not _is_same(there, manifest):
            raise Refused(
                f"{error.message}; it belongs to another run of this name, in "
                f"{there['metadata'].get('annotations', {}).get(FOLDER, 'no folder')}",
                status=error.status,
                reason=error.reason,
                remedy="give this run another name (run: ...), or wait for the other one",
            ) from error

    def _is_ours(self, pod: Manifest) -> bool:
        return bool(pod["metadata"].get("annotations", {}).get(FOLDER) == self.job.folder)

    def _note(self, node: int) -> None:
        job = None
        with contextlib.suppress(Refused, Unreachable):
            job = self.cluster.get(self.job.kinds[0], self.job.name)
        self.note(pod_waited(int(self.job.labels[ATTEMPT]), node, job, self._seen.get(node)))
        self._noted.add(node)

    def _events(self, name: str) -> list[Manifest]:
        return self.cluster.list(EVENT, fields=f"involvedObject.name={name}")

    def _report(self, node: int, reason: str) -> None:
        """Report what a node's pod waits for, unless this pod or another one waited for it before.

        A back-off that names no cause says nothing new.
        """
        if not reason or same_wait(reason, self._reasons.get(node, "")):
            return
        others = [text for other, text in self._reasons.items() if other != node]
        self._reasons[node] = reason
        if not any(same_wait(reason, text) for text in others):
            self._report_pending(reason)

    def _report_pending(self, reason: str) -> None:
        self._reported = reason
        attempt = int(self.job.labels[ATTEMPT])
        self.notify(PodsPending(attempt=attempt, job=self.job.name, reason=redact(reason)))

    def _pause(self, seconds: float) -> None:
        if self.ending.wait(seconds):
            raise Unreachable("asked to stop before the cluster's API server answered")

    def _nodes(self) -> range:
        return range(self.job.compute.nodes)


def _born(pod: Manifest) -> str:
    return str(pod["metadata"]["creationTimestamp"])


def _uid(pod: Manifest) -> str:
    return str(pod["metadata"]["uid"])


def _is_same(there: Manifest, mine: Manifest) -> bool:
    """Return whether two objects belong to the same attempt of the same supervisor."""
    held, meant = there["metadata"], mine["metadata"]
    return bool(
        held.get("annotations", {}).get(FOLDER) == meant["annotations"][FOLDER]
        and held.get("labels", {}).get(GENERATION) == meant["labels"][GENERATION]
    )
