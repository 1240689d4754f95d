"""`steadytrain doctor --cluster`: run every check in order, and report what each one found.

The last checks are round trips to the services that a run uses: S3, MLflow, Kubeflow Pipelines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.shared.cluster import POD, Refused, connect
from steadytrain.components.shared.cluster import Cluster as OneNamespace
from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.shared.errors import BadInput, SteadytrainError, TrackingError
from steadytrain.components.shared.kubeflow.connection import connect as connect_to_pipelines
from steadytrain.components.shared.kubeflow.variables import HOST_VARIABLE
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.storage import open_storage
from steadytrain.components.shared.tracking.connect import (
    import_mlflow,
    short_timeouts,
    shown,
    tracking_errors,
)
from steadytrain.components.train.launch.evidence import hopeless, why_pending
from steadytrain.pipelines.cluster.access import (
    APPLY,
    SECONDS,
    Cluster,
    Line,
    all_items,
    check_connection,
    failed,
    open_cluster,
    passed,
    reason,
    status_of,
    unchecked,
)
from steadytrain.pipelines.cluster.capabilities import (
    check_gpus,
    check_kinds,
    check_quota,
    check_runtime,
    check_volume,
)
from steadytrain.pipelines.cluster.nodes import misfit
from steadytrain.pipelines.cluster.trial import (
    probe_job,
    try_collectives,
    try_compiler,
    try_image,
    try_tracking_in_pod,
)

_PROBE_BYTES = 1 << 20


def try_storage(address: str) -> Line:
    """Write an object, read it back, compare the two, and delete it.

    Raises:
        SteadytrainError: the storage cannot be used.
    """
    topic = "S3"
    if not address:
        return unchecked(topic, "no address is given", "name one: --storage s3://bucket/prefix")
    storage, name = open_storage(address), f"steadytrain-doctor-{secrets.token_hex(4)}"
    content = secrets.token_bytes(_PROBE_BYTES)
    storage.write(name, content)
    try:
        back = storage.read(name)
    finally:
        storage.delete(name)
    if hashlib.sha256(back).digest() != hashlib.sha256(content).digest():
        return failed(
            topic,
            f"{address} returned different bytes than were written",
            "a proxy or cache between this machine and the bucket changes objects",
        )
    if storage.exists(name):
        return failed(
            topic,
            f"{address}: an object is still there after it was deleted",
            "give the credentials permission to delete (s3:DeleteObject)",
        )
    return passed(topic, f"{address}: wrote an object, read it back, compared and deleted it")


def try_tracking() -> Line:
    """Create an experiment and a run, log to the run, read it back, and delete both.

    Raises:
        TrackingError: the server cannot be used.
    """
    topic, uri = "MLflow", os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        return unchecked(topic, "MLFLOW_TRACKING_URI is not set", "set it to the server's address")
    with short_timeouts(), tracking_errors(uri):
        client = import_mlflow().MlflowClient(uri)
        experiment = client.create_experiment(f"steadytrain-doctor-{secrets.token_hex(4)}")
        try:
            value = _log(client, experiment)
        finally:
            client.delete_experiment(experiment)
    if value != 1.0:
        raise TrackingError(f"{shown(uri)} returned {value} for a metric of 1.0")
    return passed(topic, f"{shown(uri)}: created a run, logged to it, read it and deleted it")


def _log(client: Any, experiment: str) -> float | None:
    run = client.create_run(experiment).info.run_id
    try:
        client.log_param(run, "asked_by", "doctor")
        client.log_metric(run, "probe", 1.0)
        value = client.get_run(run).data.metrics.get("probe")
        return None if value is None else float(value)
    finally:
        client.delete_run(run)


def try_pipelines(host: str) -> Line:
    """Ask Kubeflow Pipelines for its health and version.

    Raises:
        SteadytrainError: it cannot be reached, or it is too old.
    """
    topic = "Kubeflow Pipelines"
    if not (host or os.environ.get(HOST_VARIABLE) or "KUBERNETES_SERVICE_HOST" in os.environ):
        return unchecked(topic, "no address is given", f"give --host or set {HOST_VARIABLE}")
    try:
        server = connect_to_pipelines(host)
    except BadInput as error:
        return failed(topic, error.message, error.remedy)
    health = server.client.health()
    return passed(topic, f"{server.host}, version {health.get('tag_name') or 'unknown'}")


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
    nodes: pods whose ranks exchange tensors; 0 skips the check.
    ranks: of each; 0 means those of `compute`, or one.
    probe_seconds: the time limit of that check, once the pods run.
    """

    namespace: str = ""
    service_account: str = ""
    image: str
    step_image: str
    image_seconds: float = 300.0
    compute: ComputeConfig | None = None
    storage: str = ""
    host: str = ""
    nodes: int = 0
    ranks: int = 0
    probe_seconds: float = 120.0


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
    if questions.nodes:
        yield from checked("collectives", lambda: _try_collectives(questions, image_works))
    starting = states.get("rollout") == "fail"
    for topic, ask in (
        ("S3", lambda: try_storage(questions.storage)),
        ("MLflow", lambda: _try_tracking(questions, image_works, starting)),
        ("Kubeflow Pipelines", lambda: try_pipelines(questions.host)),
    ):
        yield from checked(topic, ask)


def _try_collectives(questions: Questions, image_works: bool) -> Line:
    """Check what ranks in several pods exchange."""
    if not image_works:
        return unchecked("collectives", "no pod can run", "see the line `image`")
    job = probe_job(
        questions.compute,
        questions.nodes,
        questions.ranks,
        questions.image_seconds + questions.probe_seconds,
        questions.image,
    )
    cluster = open_cluster(questions.namespace)
    return try_collectives(cluster, job, questions.probe_seconds, questions.image_seconds)


def _try_tracking(questions: Questions, image_works: bool, starting: bool) -> Line:
    """Check MLflow from a pod, which connects as the steps do.

    Check it from this machine instead if no pod can run, or if the Secret has no address and the
    environment has one.
    """
    if starting:
        return unchecked("MLflow", "its server has not started", "see the line `rollout`")
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
        yield unchecked("all checks within the cluster", "not connected", "fix the above first")
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
        return unchecked(
            topic, "no configuration is given", "name one: steadytrain doctor my.yaml --cluster"
        )
    try:
        problem = misfit(compute, connect())
    except Refused as error:
        return unchecked(topic, error.message, error.remedy)
    if problem is None:
        return passed(topic, "a node can hold a training pod")
    return failed(topic, str(problem), problem.remedy)


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
        deployments = all_items(api.list_namespaced_deployment, cluster.namespace)
    except client.ApiException as error:
        if status_of(error) != 403:
            raise
        yield unchecked("rollout", reason(error), "use an account that may read Deployments")
        return
    deadline = time.monotonic() + timeout_seconds
    for item in deployments:
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
