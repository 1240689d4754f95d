"""The doctor's check of what ranks in several pods exchange, as a TrainJob of its own."""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any, Final

from steadytrain.components.shared.config import ComputeConfig, RecoveryConfig
from steadytrain.components.shared.quantities import duration
from steadytrain.components.train.launch.collectives import judged
from steadytrain.components.train.launch.job import TRAIN_JOB, TrainJob
from steadytrain.components.train.launch.naming import run_labels
from steadytrain.components.train.launch.own_pod import OwnPod
from steadytrain.pipelines.cluster.access import (
    SECONDS,
    Cluster,
    Line,
    failed,
    passed,
    reason,
    status_of,
    unchecked,
)
from steadytrain.pipelines.cluster.trial import ACCOUNT

_TOPIC: Final = "collectives"
_MODULE: Final = "steadytrain.components.train.launch.collectives"
_POLL_SECONDS: Final = 1.0
_PODS: Final = {"cpu": "1", "memory": "2Gi", "shared_memory": "1Gi", "service_account": ACCOUNT}


def probe_job(
    compute: ComputeConfig | None, nodes: int, ranks: int, seconds: float, image: str
) -> TrainJob:
    """Return the job, whose pods have the labels of a run, so that network policies let them talk.

    Args:
        compute: of the run whose pods to imitate; None means small ones without GPUs.
        ranks: of each pod; 0 means those of `compute`, or one.
    """
    basis = compute or ComputeConfig.model_validate({"device": "cpu", "pods": _PODS})
    each = ranks or basis.nproc_per_node
    used = basis.model_copy(update={"nodes": nodes, "nproc_per_node": each})
    name = f"steadytrain-doctor-{secrets.token_hex(3)}"
    options = [f"--ranks={each}", f"--nodes={nodes}", f"--seconds={seconds:g}"]
    return TrainJob(
        name=name,
        folder="/nowhere",
        labels=run_labels(name),
        command=["python", "-m", _MODULE, *options],
        compute=used,
        recovery=RecoveryConfig(),
        own=OwnPod(image=image),
    )


def try_collectives(
    cluster: Cluster, job: TrainJob, seconds: float, pending_seconds: float
) -> Line:
    """Run the job, read what its ranks say, and delete it.

    Args:
        seconds: the time limit of the ranks. pending_seconds: how long the pods may take to start.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    from kubernetes import client

    custom, made = client.CustomObjectsApi(cluster.api), []
    try:
        for kind, manifest in job.manifests():
            custom.create_namespaced_custom_object(
                *(kind.group, kind.version, cluster.namespace, kind.plural, manifest),
                _request_timeout=SECONDS,
            )
            made.append(kind)
        return _watch(client.CoreV1Api(cluster.api), cluster, job, seconds, pending_seconds)
    except client.ApiException as error:
        if status_of(error) in (403, 404) and TRAIN_JOB not in made:
            fix = "install Kubeflow Trainer 2, and use an account that may create TrainJobs"
            return unchecked(_TOPIC, reason(error), fix)
        raise
    finally:
        for kind in reversed(made):
            with contextlib.suppress(client.ApiException):
                custom.delete_namespaced_custom_object(
                    *(kind.group, kind.version, cluster.namespace, kind.plural, job.name),
                    _request_timeout=SECONDS,
                )


def _watch(
    core: Any, cluster: Cluster, job: TrainJob, seconds: float, pending_seconds: float
) -> Line:
    """Wait until every pod has ended, and judge their output; or say what is missing."""
    selector = ",".join(f"{key}={value}" for key, value in job.labels.items())
    nodes, ranks = job.compute.nodes, job.compute.world_size
    deadline = time.monotonic() + pending_seconds + seconds
    while True:
        pods = core.list_namespaced_pod(
            cluster.namespace, label_selector=selector, _request_timeout=SECONDS
        ).items
        ended = [pod for pod in pods if pod.status.phase in ("Succeeded", "Failed")]
        if len(ended) >= nodes or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    begun = [pod for pod in pods if pod.status.phase not in ("Pending", "Unknown")]
    if len(begun) < nodes:
        said = next((text for pod in pods if (text := _pending(pod))), "no message")
        return failed(
            _TOPIC,
            f"{len(begun)} of {nodes} pods have started within {duration(pending_seconds)}: {said}",
            "check free capacity with `kubectl describe nodes`, or give fewer --nodes",
        )
    lines = [line for pod in begun for line in _log(core, cluster.namespace, pod)]
    found = judged(lines, ranks, seconds)
    if found.good:
        return passed(_TOPIC, f"{nodes} pods, {found.text}")
    return failed(_TOPIC, f"{nodes} pods: {found.text}", found.remedy)


def _pending(pod: Any) -> str:
    for condition in pod.status.conditions or ():
        if condition.status == "False" and condition.message:
            return str(condition.message)
    return ""


def _log(core: Any, namespace: str, pod: Any) -> list[str]:
    # Without decoding by the client, which would parse JSON.
    answer = core.read_namespaced_pod_log(
        pod.metadata.name, namespace, _request_timeout=SECONDS, _preload_content=False
    )
    return list(answer.data.decode(errors="replace").splitlines())
