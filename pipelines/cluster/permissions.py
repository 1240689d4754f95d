"""Rights that the launcher and the exit handler need in the namespace, and a check for them.

manifests/base/launcher.yaml has the same rights, as a Role.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from steadytrain.pipelines.cluster.access import SECONDS, Cluster
from steadytrain.pipelines.cluster.line import APPLY, Line, failed, passed


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
