"""Wait for the Deployments of the manifests, which start for minutes after they are applied."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from steadytrain.components.shared.cluster import POD
from steadytrain.components.shared.cluster import Cluster as OneNamespace
from steadytrain.components.shared.quantities import duration
from steadytrain.components.train.launch.evidence import hopeless, why_pending
from steadytrain.pipelines.cluster.access import SECONDS, Cluster, all_items, reason, status_of
from steadytrain.pipelines.cluster.line import Line, failed, passed, unasked

_POLL_SECONDS: Final = 1.0


def wait_for_rollouts(cluster: Cluster, timeout_seconds: float) -> Iterator[Line]:
    """Yield a line for each Deployment of ours: that it is available, or why it is not.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
        SteadytrainError: the pods of a Deployment cannot be listed.
    """
    from kubernetes import client

    api = client.AppsV1Api(cluster.api)
    try:
        found = all_items(api.list_namespaced_deployment, cluster.namespace)
    except client.ApiException as error:
        if status_of(error) != 403:
            raise
        yield unasked("rollout", reason(error), "use an account that may read Deployments")
        return
    deadline = time.monotonic() + timeout_seconds
    for item in found:
        if (item.metadata.labels or {}).get("app.kubernetes.io/part-of") == "steadytrain":
            yield _waited(api, cluster, item.metadata.name, deadline)


def _waited(api: Any, cluster: Cluster, name: str, deadline: float) -> Line:
    topic, began = "rollout", time.monotonic()
    while True:
        item = api.read_namespaced_deployment(name, cluster.namespace, _request_timeout=SECONDS)
        if _is_available(item):
            return passed(topic, f"{name} is available")
        labels = item.spec.selector.match_labels
        pods = OneNamespace(cluster.api, cluster.namespace).list(POD, labels)
        wrong = next(filter(None, map(hopeless, pods)), None)
        if wrong:
            return failed(topic, f"{name} cannot start: {wrong.message}", wrong.remedy)
        now = time.monotonic()
        if now > deadline:
            why = next(filter(None, map(why_pending, pods)), "its pods run, but are not ready")
            return failed(
                topic,
                f"{name} is still starting after {duration(now - began)}: {why}",
                "run it again later; if the reason stays the same, fix what it names",
            )
        time.sleep(_POLL_SECONDS)


def _is_available(deployment: Any) -> bool:
    status, wanted = deployment.status, deployment.spec.replicas
    current = (status.observed_generation or 0) >= deployment.metadata.generation
    ready = min(status.updated_replicas or 0, status.available_replicas or 0)
    return bool(current and ready >= wanted)
