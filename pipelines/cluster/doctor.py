"""`steadytrain doctor --cluster`: run every check in order, and report what each one found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.pipelines.cluster.access import check_connection, open_cluster, reason
from steadytrain.pipelines.cluster.line import Line, failed, unasked
from steadytrain.pipelines.cluster.offers import (
    check_gpus,
    check_kinds,
    check_quota,
    check_runtime,
    check_volume,
)
from steadytrain.pipelines.cluster.permissions import check_permissions
from steadytrain.pipelines.cluster.trial import try_image, try_tracking_in_pod
from steadytrain.pipelines.cluster.trips import try_pipelines, try_storage, try_tracking


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What to check.

    namespace: where runs will work; "" means the connection's own.
    service_account: whose rights to check; "" means those of the connection.
    image: the training image.
    image_seconds: how long to wait for a pod with that image.
    storage: an s3:// address; "" skips the check.
    host: address of Kubeflow Pipelines; "" means the one in the environment.
    """

    namespace: str = ""
    service_account: str = ""
    image: str
    image_seconds: float = 300.0
    storage: str = ""
    host: str = ""


def examine_cluster(questions: Questions) -> Iterator[Line]:
    """Yield a line for each check as soon as its result is known."""
    image_works = False
    for line in _within_the_cluster(questions):
        yield line
        image_works = image_works or (line.topic == "image" and line.state == "pass")
    for topic, ask in (
        ("S3", lambda: try_storage(questions.storage)),
        ("MLflow", lambda: _try_tracking(questions, image_works)),
        ("Kubeflow Pipelines", lambda: try_pipelines(questions.host)),
    ):
        yield from checked(topic, ask)


def _try_tracking(questions: Questions, image_works: bool) -> Line:
    """Check MLflow from a pod, which connects as the steps do.

    Check it from this machine instead if no pod can run, or if the Secret has no address and the
    environment has one.
    """
    if image_works:
        cluster = open_cluster(questions.namespace)
        line = try_tracking_in_pod(cluster, questions.image, questions.image_seconds)
        if line.state != "not asked" or not os.environ.get("MLFLOW_TRACKING_URI"):
            return line
    return try_tracking()


def _within_the_cluster(questions: Questions) -> Iterator[Line]:
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
        ("image", lambda: try_image(cluster, questions.image, questions.image_seconds)),
    )
    for topic, ask in checks:
        yield from checked(topic, ask)


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
