"""`steadytrain doctor --cluster`: run every check in order, and report what each one found."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from steadytrain.components.shared.cluster import Refused, connect
from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.pipelines.cluster.access import (
    Line,
    check_connection,
    failed,
    open_cluster,
    passed,
    reason,
    unasked,
)
from steadytrain.pipelines.cluster.capabilities import (
    check_gpus,
    check_kinds,
    check_quota,
    check_runtime,
    check_volume,
)
from steadytrain.pipelines.cluster.installation import check_permissions, wait_for_rollouts
from steadytrain.pipelines.cluster.nodes import misfit
from steadytrain.pipelines.cluster.round_trips import try_pipelines, try_storage, try_tracking
from steadytrain.pipelines.cluster.trial import try_compiler, try_image, try_tracking_in_pod


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What to check.

    namespace: where runs will work; "" means the connection's own.
    service_account: whose rights to check; "" means those of the connection.
    image: the training image.
    step_image: the image of the steps that do not train.
    image_seconds: how long to wait for a pod with one of them, and for the manifests' Deployments.
    compute: of the run whose pods are compared with the nodes; None skips the check.
    storage: an s3:// address; "" skips the check.
    host: address of Kubeflow Pipelines; "" means the one in the environment.
    """

    namespace: str = ""
    service_account: str = ""
    image: str
    step_image: str
    image_seconds: float = 300.0
    compute: ComputeConfig | None = None
    storage: str = ""
    host: str = ""


def examine_cluster(questions: Questions) -> Iterator[Line]:
    """Yield a line for each check as soon as its result is known."""
    states: dict[str, str] = {}
    for line in _cluster_checks(questions):
        yield line
        states[line.topic] = line.state
    image_works = states.get("image") == "pass"
    if image_works:
        cluster = open_cluster(questions.namespace)
        seconds = questions.image_seconds
        yield from checked("compiler", lambda: try_compiler(cluster, questions.image, seconds))
    starting = states.get("rollout") == "fail"
    for topic, ask in (
        ("S3", lambda: try_storage(questions.storage)),
        ("MLflow", lambda: _try_tracking(questions, image_works, starting)),
        ("Kubeflow Pipelines", lambda: try_pipelines(questions.host)),
    ):
        yield from checked(topic, ask)


def _try_tracking(questions: Questions, image_works: bool, starting: bool) -> Line:
    """Check MLflow from a pod, which connects as the steps do.

    Check it from this machine instead if no pod can run, or if the Secret has no address and the
    environment has one.
    """
    if starting:
        return unasked("MLflow", "its server has not started", "see the line `rollout`")
    if image_works:
        cluster = open_cluster(questions.namespace)
        line = try_tracking_in_pod(cluster, questions.image, questions.image_seconds)
        if line.state != "not asked" or not os.environ.get("MLFLOW_TRACKING_URI"):
            return line
    return try_tracking()


def _cluster_checks(questions: Questions) -> Iterator[Line]:
    connected = False
    for line in checked("cluster", lambda: check_connection(open_cluster(questions.namespace))):
        yield line
        connected = line.state == "pass"
    if not connected:
        yield unasked("all checks within the cluster", "not connected", "fix the above first")
        return
    cluster = open_cluster(questions.namespace)
    checks: tuple[tuple[str, Callable[[], Line | Iterable[Line]]], ...] = (
        ("permissions", lambda: check_permissions(cluster, questions.service_account)),
        ("kinds", lambda: check_kinds(cluster)),
        ("runtime", lambda: check_runtime(cluster)),
        ("GPUs", lambda: check_gpus(cluster)),
        ("quota", lambda: check_quota(cluster)),
        ("volume", lambda: check_volume(cluster)),
        ("pods", lambda: _check_pods(questions.compute)),
        ("image", lambda: try_image(cluster, questions.image, questions.image_seconds)),
        (
            "step image",
            lambda: try_image(cluster, questions.step_image, questions.image_seconds, "step image"),
        ),
        ("rollout", lambda: wait_for_rollouts(cluster, questions.image_seconds)),
    )
    for topic, ask in checks:
        yield from checked(topic, ask)


def _check_pods(compute: ComputeConfig | None) -> Line:
    """Check whether the configuration's training pods fit on any node."""
    topic = "pods"
    if compute is None:
        return unasked(
            topic, "no configuration is given", "name one: steadytrain doctor my.yaml --cluster"
        )
    try:
        found = misfit(compute, connect())
    except Refused as error:
        return unasked(topic, error.message, error.remedy)
    if found is None:
        return passed(topic, "a node can hold a training pod")
    return failed(topic, str(found), found.remedy)


def checked(topic: str, ask: Callable[[], Line | Iterable[Line]]) -> Iterator[Line]:
    """Yield the lines of a check. If it raises an expected error, yield that as a failed line."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        answer = ask()
        yield from [answer] if isinstance(answer, Line) else answer
    except SteadytrainError as error:
        yield failed(topic, error.message, error.remedy)
    except ApiException as error:
        yield failed(
            topic, reason(error), "check the credentials of the connection and their permissions"
        )
    except HTTPError as error:
        yield failed(
            topic,
            f"no answer from the API server: {reason(error)}",
            "check the address in KUBECONFIG and the network path to it (VPN, firewall)",
        )


if __name__ == "__main__":
    (line,) = checked("MLflow", try_tracking)
    print(json.dumps(dataclasses.asdict(line)))
