"""A run on a server, seen from outside: its steps, what its pods wait for, and how it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from steadytrain.components.report.sentences import from_log
from steadytrain.components.report.story import REPORT_STEP as _REPORT
from steadytrain.components.report.story import RunSummary
from steadytrain.components.shared.cluster import POD, Cluster, Manifest, Refused, Unreachable
from steadytrain.components.shared.cluster import connect as connect_to_cluster
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import ServerError
from steadytrain.components.shared.kubeflow.connection import Server
from steadytrain.components.shared.retry import AWAY_SECONDS, FOREVER, Retry, any_error
from steadytrain.components.train.launch.evidence import (
    hopeless,
    is_waiting,
    same_wait,
    unreachable,
    why_pending,
)
from steadytrain.components.train.launch.naming import PIPELINE_RUN, RUN
from steadytrain.pipelines.pod_names import SUPERVISING

HOPELESS_SECONDS: Final = 60.0
"""How long a step's pod may wait for an image that does not exist, until the wait ends."""
REGISTRY_SECONDS: Final = 600.0
"""The same for a registry that does not answer."""
_AGAIN_SECONDS: Final = 60.0
"""How long not to ask a cluster that did not answer."""
_STANDALONE: Final = "kubeflow"
"""Where a standalone Kubeflow Pipelines starts its runs."""
_NODE_NAME: Final = "workflows.argoproj.io/node-name"
"""Argo's annotation with a pod's place in the pipeline, such as name.root.train.executor."""


@dataclass(frozen=True)
class Waits:
    """What the pods wait for.

    reasons: by step; a step none of whose pods waits is missing.
    stuck: why a step will never start; "" as long as it may.
    """

    reasons: Mapping[str, str] = field(default_factory=dict)
    stuck: str = ""


class RunPods:
    """The pods of one run.

    Args:
        run_id: the server's id of the run.
        namespace: where they are; "" means the kubeconfig's namespace or Kubeflow's own.
        steps: names of the run's steps.
        notify: called once if the pods cannot be seen. Nothing is concluded from that.
    """

    def __init__(
        self,
        run_id: str,
        namespace: str,
        steps: Collection[str],
        notify: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.run_id, self.steps = run_id, steps
        self._retry = Retry(
            transient=any_error,
            seconds=FOREVER,
            delays=(_AGAIN_SECONDS, _AGAIN_SECONDS),
            report=lambda why: notify(f"what pods wait for is not shown: {why}"),
        )
        self._namespace = namespace
        self._since: dict[str, float] = {}

    def look(self) -> Waits:
        """Return what the pods wait for now."""
        if not self._retry.due:
            return Waits()
        try:
            pods = self._pods()
        except (Unreachable, Refused) as error:
            self._retry.may_pass(error)
            return Waits()
        waiting = [pod for pod in pods if _is_pending(pod)]
        reasons = {self._step(pod): why_pending(pod) for pod in waiting}
        return Waits({step: why for step, why in reasons.items() if why}, self._stuck(waiting))

    def _pods(self) -> list[Manifest]:
        cluster = connect_to_cluster()
        for namespace in dict.fromkeys(self._namespaces(cluster)):
            result = Cluster(cluster.client, namespace).list(POD, {PIPELINE_RUN: self.run_id})
            if result:
                self._namespace = namespace
                return result
        return []

    def _namespaces(self, cluster: Cluster) -> Iterator[str]:
        if self._namespace:
            yield self._namespace
        else:
            yield from (cluster.namespace, _STANDALONE)

    def _stuck(self, waiting: Collection[Manifest]) -> str:
        """Return why a step's own pod will never start. Training pods are the train step's."""
        now, since, stuck = time.monotonic(), dict[str, float](), ""
        for pod in waiting:
            wrong = hopeless(pod)
            why = wrong or unreachable(pod)
            if why is None or RUN in pod["metadata"].get("labels", {}):
                continue
            name = pod["metadata"]["name"]
            since[name] = self._since.get(name, now)
            if now - since[name] >= (HOPELESS_SECONDS if wrong else REGISTRY_SECONDS):
                stuck = f"{self._step(pod)} cannot start: {why.message}"
        self._since = since
        return stuck

    def _step(self, pod: Manifest) -> str:
        """Return the step that a pod belongs to, or the pod's name if that is unknown."""
        metadata = pod["metadata"]
        name = str(metadata["name"])
        if RUN in metadata.get("labels", {}):
            return next((step for step in self.steps if step in SUPERVISING), name)
        node_name = str(metadata.get("annotations", {}).get(_NODE_NAME, ""))
        parts = [part.removesuffix("-driver") for part in node_name.split(".")]
        return next((part for part in reversed(parts) if part in self.steps), name)


def _is_pending(pod: Manifest) -> bool:
    return pod["status"].get("phase") == "Pending" and is_waiting(pod)


ENDED: Final = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")
"""The final states. KFP's own client waits forever for a run that was canceled."""

_POLL_SECONDS = 5.0
_AWAY_SECONDS = 600.0
"""How long a server may be unreachable while a run is followed."""
_LOG_BYTES = 1 << 20
"""How much of the end of the report's log is searched for the run's story."""

Steps = dict[str, "Step"]


@dataclass(frozen=True)
class Step:
    """A step of a run.

    seconds: how long it ran, or has been running; None before its start.
    waits_for: what its pod, or the pods that train for it, wait for; "" if they do not.
    """

    state: str
    seconds: float | None
    waits_for: str = ""

    def same(self, other: Step | None) -> bool:
        """Return whether another look at the step shows nothing new."""
        if other is None or other.state != self.state:
            return False
        return same_wait(self.waits_for, other.waits_for)


@dataclass(frozen=True)
class PipelineOutcome:
    """How a run ended.

    message: the server's error message, or why the wait for the run ended before the run.
    story: the run's own account, as its report printed it; None if there is none.
    stuck: whether the run continues, but a step of it can never start.
    """

    state: str
    steps: Steps
    message: str
    story: RunSummary | None = None
    stuck: bool = False

    @property
    def succeeded(self) -> bool:
        return self.state in ("SUCCEEDED", "SKIPPED")


def follow(
    server: Server,
    run_id: str,
    names: Collection[str],
    on_change: Callable[[Steps], object],
    *,
    pods: RunPods | None = None,
    poll_seconds: float = _POLL_SECONDS,
    away_seconds: float = _AWAY_SECONDS,
    denied_seconds: float = AWAY_SECONDS,
) -> PipelineOutcome:
    """Poll a run until it ends, or until a step turns out to be unable to start.

    Args:
        names: the steps to report. To the server, a step is several nodes: its driver, the step
            itself, its executors and their retries. Groups of steps are nodes, too.
        on_change: called with the steps, in the order of their starts, when a state or what a step
            waits for has changed.
        pods: the run's pods, which tell what the steps wait for; None leaves that out.
        away_seconds: how long to retry a broken connection.
        denied_seconds: how long the server may deny access (401, 403), as while it restarts.

    Raises:
        ServerError: no connection or no access for longer than that, or a permanent refusal.
    """
    before: Steps = {}
    retry = Retry(
        seconds=away_seconds, denied_seconds=denied_seconds, delays=(poll_seconds, poll_seconds)
    )
    while True:
        run = retry(lambda: server.runs.run_service_get_run(run_id=run_id))
        ended = run.state in ENDED
        waits = pods.look() if pods and not ended else Waits()
        steps = _waiting(_steps(run, names), waits)
        if steps.keys() != before.keys() or not all(
            step.same(before[name]) for name, step in steps.items()
        ):
            before = steps
            on_change(steps)
        if ended:
            message = run.error.message if run.error else ""
            story = story_of(server, run)
            return PipelineOutcome(str(run.state), steps, redact(message or ""), story)
        if waits.stuck:
            return PipelineOutcome(str(run.state), steps, redact(waits.stuck), stuck=True)
        time.sleep(poll_seconds)


def story_of(server: Server, run: Any) -> RunSummary | None:
    """Return the story that the report of a run printed; None if its log has none."""
    details = (run.run_details and run.run_details.task_details) or ()
    # The server names the pod of a step in one of the step's nodes.
    reports = {item.task_id for item in details if _REPORT in (item.display_name or "")}
    steps = [item for item in details if {item.task_id, item.parent_task_id} & reports]
    children = [child for item in steps for child in item.child_tasks or ()]
    for pod in dict.fromkeys(item.pod_name for item in [*steps, *children] if item.pod_name):
        log_address = f"/apis/v1beta1/runs/{run.run_id}/nodes/{pod}/log"
        with contextlib.suppress(ServerError):
            if story := from_log(server.client.text(log_address, most_bytes=_LOG_BYTES)):
                return story
    return None


def _waiting(steps: Steps, waits: Waits) -> Steps:
    """Return the steps with what they wait for. A step that is done waits no more."""
    for name, reason in waits.reasons.items():
        known = steps.get(name) or Step("PENDING", None)
        if known.state in ("PENDING", "RUNNING"):
            steps[name] = replace(known, waits_for=redact(reason))
    return steps


def _steps(run: Any, names: Collection[str]) -> Steps:
    """Return the steps in the order of their starts."""
    details = (run.run_details and run.run_details.task_details) or ()
    shown = [item for item in details if item.display_name in names]
    return {item.display_name: _step(item) for item in sorted(shown, key=_began)}


def _began(task: Any) -> float:
    return _seconds(task.start_time) or _seconds(task.create_time) or float("inf")


def _step(task: Any) -> Step:
    began = _seconds(task.start_time)
    end = _seconds(task.end_time) or time.time()
    return Step(str(task.state or "PENDING"), max(0.0, end - began) if began else None)


def _seconds(moment: Any) -> float:
    """Return the seconds since 1970. 0 means not set, for which the server may also send 1970."""
    return max(0.0, moment.timestamp()) if moment else 0.0
