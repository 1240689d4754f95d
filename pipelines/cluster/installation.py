"""What the manifests install: rights in the namespace, and Deployments that start for minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.shared.cluster import POD
from steadytrain.components.shared.cluster import Cluster as OneNamespace
from steadytrain.components.shared.quantities import duration
from steadytrain.components.train.launch.evidence import hopeless, why_pending
from steadytrain.pipelines.cluster.access import (
    APPLY,
    SECONDS,
    Cluster,
    Line,
    all_items,
    failed,
    passed,
    reason,
    status_of,
    unchecked,
)

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
        yield unchecked("rollout", reason(error), "use an account that may read Deployments")
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


# Rights that the launcher and the exit handler need in the namespace, and a check for them.
#
# manifests/base/launcher.yaml has the same rights, as a Role.


@dataclass(frozen=True)
class Right:
    """Verbs on one kind of object. `resource` is its plural name."""

    group: str
    resource: str
    verbs: tuple[str, ...]


_BESIDES: Final = (
    Right("", "pods", ("get", "list")),
    Right("", "events", ("list",)),
    # The exit handler checks whether the run was terminated.
    Right("argoproj.io", "workflows", ("get",)),
)
RIGHTS: Final = (
    Right("trainer.kubeflow.org", "trainjobs", ("create", "get", "list", "patch", "delete")),
    Right("trainer.kubeflow.org", "trainingruntimes", ("create", "get", "list", "delete")),
    *_BESIDES,
)
PYTORCHJOB_RIGHTS: Final = (
    Right("kubeflow.org", "pytorchjobs", ("create", "get", "list", "delete")),
    *_BESIDES,
)
"""Rights on a cluster without Trainer 2 (manifests/components/pytorchjob)."""


def check_permissions(cluster: Cluster, service_account: str) -> Iterator[Line]:
    """Yield a line for each kind of object: whether all the needed verbs are allowed.

    Args:
        service_account: whose rights to check; "" means those of the connection itself.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    asking = cluster.acting_as(service_account) if service_account else cluster
    who = service_account or "this account"
    for right in _needed(cluster):
        topic = f"may {right.resource}"
        denied = [verb for verb in right.verbs if not _allowed(asking, right, verb)]
        if denied:
            yield failed(
                topic,
                f"{who} may not {', '.join(denied)} {right.resource} in {cluster.namespace}",
                f"{APPLY}; its RoleBinding must name the account that the steps run under",
            )
        else:
            yield passed(topic, ", ".join(right.verbs))


def _needed(cluster: Cluster) -> tuple[Right, ...]:
    groups = {group["name"] for group in cluster.get("/apis")["groups"]}
    pytorchjob = PYTORCHJOB_RIGHTS[0].group in groups and RIGHTS[0].group not in groups
    return PYTORCHJOB_RIGHTS if pytorchjob else RIGHTS


def _allowed(cluster: Cluster, right: Right, verb: str) -> bool:
    from kubernetes import client

    review = client.V1SelfSubjectAccessReview(
        spec=client.V1SelfSubjectAccessReviewSpec(
            resource_attributes=client.V1ResourceAttributes(
                namespace=cluster.namespace,
                group=right.group,
                resource=right.resource,
                verb=verb,
            )
        )
    )
    answer = client.AuthorizationV1Api(cluster.api).create_self_subject_access_review(
        review, _request_timeout=SECONDS
    )
    return bool(answer.status.allowed)
