"""What the pods of a run on a server wait for, as the cluster says it.

The server itself reports a pod without a node or an image as running, forever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from steadytrain.components.shared.cluster import POD, Cluster, Manifest, Refused, Unreachable
from steadytrain.components.shared.cluster import connect as connect_to_cluster
from steadytrain.components.shared.retry import FOREVER, Retry, any_error
from steadytrain.components.train.launch.evidence import (
    hopeless,
    is_waiting,
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
        tell: called once if the pods cannot be seen. Nothing is concluded from that.
    """

    def __init__(
        self,
        run_id: str,
        namespace: str,
        steps: Collection[str],
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.run_id, self.steps = run_id, steps
        self._retry = Retry(
            transient=any_error,
            seconds=FOREVER,
            delays=(_AGAIN_SECONDS, _AGAIN_SECONDS),
            report=lambda why: tell(f"what pods wait for is not shown: {why}"),
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
        for namespace in dict.fromkeys(self._places(cluster)):
            found = Cluster(cluster.client, namespace).list(POD, {PIPELINE_RUN: self.run_id})
            if found:
                self._namespace = namespace
                return found
        return []

    def _places(self, cluster: Cluster) -> Iterator[str]:
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
        place = str(metadata.get("annotations", {}).get(_NODE_NAME, ""))
        parts = [part.removesuffix("-driver") for part in place.split(".")]
        return next((part for part in reversed(parts) if part in self.steps), name)


def _is_pending(pod: Manifest) -> bool:
    return pod["status"].get("phase") == "Pending" and is_waiting(pod)
