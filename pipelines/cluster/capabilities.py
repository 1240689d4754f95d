"""What the cluster has: object kinds, the Trainer, GPUs, free quota, and a volume."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

from steadytrain.components.shared.cluster import NODE, Manifest, Refused
from steadytrain.components.shared.cluster import Cluster as OneNamespace
from steadytrain.components.shared.config import ComputeConfig, RecoveryConfig
from steadytrain.components.train.launch.job import TRAINING_RUNTIME, TrainJob
from steadytrain.components.train.launch.naming import run_labels
from steadytrain.components.train.launch.own_pod import OwnPod
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
from steadytrain.pipelines.cluster.nodes import gpu_nodes, mig_unready
from steadytrain.pipelines.pod_names import NAME

_TRAINER = "trainer.kubeflow.org"
_INSTALL_TRAINER = (
    "install Kubeflow Trainer 2: kubectl apply --server-side -k "
    "'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.0.0'"
)
_ASK_ADMINISTRATOR = "ask someone with permission on the whole cluster to check"


def check_kinds(cluster: Cluster) -> Iterator[Line]:
    """Check which kinds of objects exist, and in which versions.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    groups = {
        group["name"]: [version["version"] for version in group["versions"]]
        for group in cluster.get("/apis")["groups"]
    }
    trainer = _has(cluster, groups, _TRAINER, "v1alpha1", "trainjobs")
    pytorch = _has(cluster, groups, "kubeflow.org", "v1", "pytorchjobs")
    if trainer:
        yield passed("TrainJob", "v1alpha1, from Trainer 2")
        if "jobset.x-k8s.io" in groups:
            yield passed("JobSet", ", ".join(groups["jobset.x-k8s.io"]))
        else:
            yield failed("JobSet", "not installed, and the Trainer needs it", _INSTALL_TRAINER)
    elif pytorch:
        yield unchecked(
            "TrainJob",
            "not installed; training uses PyTorchJob",
            f"for the launcher with the best recovery, {_INSTALL_TRAINER}",
        )
    else:
        versions = ", ".join(groups.get(_TRAINER, ()))
        yield failed(
            "TrainJob",
            f"{_TRAINER} offers {versions}, v1alpha1 is needed"
            if versions
            else "there is neither TrainJob nor PyTorchJob",
            _INSTALL_TRAINER,
        )
    if pytorch:
        yield passed("PyTorchJob", "v1")
    if _has(cluster, groups, "argoproj.io", "v1alpha1", "workflows"):
        yield passed("Workflow", "v1alpha1, from Argo")
    else:
        yield failed(
            "Workflow",
            "there is no Argo, which Kubeflow Pipelines needs",
            "install Kubeflow Pipelines 2, or connect to the cluster where it runs",
        )
    if queue := groups.get("kueue.x-k8s.io"):
        yield passed("Kueue", ", ".join(queue))


def _has(
    cluster: Cluster, groups: dict[str, list[str]], group: str, version: str, plural: str
) -> bool:
    if version not in groups.get(group, ()):
        return False
    listed = cluster.get(f"/apis/{group}/{version}")["resources"]
    return any(item["name"] == plural for item in listed)


def check_runtime(cluster: Cluster) -> Line:
    """Check with a dry run whether the Trainer's webhook accepts the TrainingRuntime of a run."""
    from kubernetes import client

    topic = "runtime"
    try:
        client.CustomObjectsApi(cluster.api).create_namespaced_custom_object(
            _TRAINER,
            "v1alpha1",
            cluster.namespace,
            "trainingruntimes",
            _runtime(),
            dry_run="All",
            _request_timeout=SECONDS,
        )
    except client.ApiException as error:
        if status_of(error) == 404:
            return unchecked(topic, "there is no Trainer", _INSTALL_TRAINER)
        if status_of(error) == 403:
            return unchecked(topic, reason(error), f"{APPLY}, or use an account with permission")
        return failed(
            topic,
            f"a TrainingRuntime is rejected: {reason(error)}",
            "check that the Trainer's controller runs: kubectl get pods -A -l "
            "app.kubernetes.io/name=trainer",
        )
    return passed(topic, "a run's TrainingRuntime would be accepted")


def _runtime() -> Manifest:
    job = TrainJob(
        name=f"steadytrain-doctor-{secrets.token_hex(3)}",
        folder="/nowhere",
        labels=run_labels("doctor"),
        command=["true"],
        compute=ComputeConfig(),
        recovery=RecoveryConfig(),
        own=OwnPod(image="steadytrain/train:0"),
    )
    return dict(job.manifests())[TRAINING_RUNTIME]


def check_gpus(cluster: Cluster) -> Line:
    """Report which GPUs the nodes have, with their memory as GPU feature discovery labels it.

    Raises:
        SteadytrainError: the API server does not answer.
    """
    topic = "GPUs"
    try:
        nodes = OneNamespace(cluster.api, cluster.namespace).list(NODE)
    except Refused as error:
        if error.status == 403:
            return unchecked(topic, "no permission to list nodes", _ASK_ADMINISTRATOR)
        raise
    gpus: Counter[str] = Counter()
    for node in gpu_nodes(nodes):
        gpus[str(node)] += node.gpus
    text = ", ".join(f"{count} x {name}" for name, count in gpus.most_common())
    unready = Counter(filter(None, map(mig_unready, nodes)))
    if unready:
        states = "; ".join(f"{count} nodes with {state}" for state, count in unready.items())
        return failed(
            topic,
            f"{text or 'none'}; {states}",
            "see the pod of nvidia-mig-manager on these nodes: `kubectl logs -n gpu-operator -l "
            "app=nvidia-mig-manager`",
        )
    return passed(topic, text or f"none on {len(nodes)} nodes: training runs on CPUs")


def check_quota(cluster: Cluster) -> Iterator[Line]:
    """Check whether the namespace's quotas have anything left.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    from kubernetes import client

    topic = "quota"
    core = client.CoreV1Api(cluster.api)
    try:
        quotas = all_items(core.list_namespaced_resource_quota, cluster.namespace)
    except client.ApiException as error:
        if status_of(error) == 403:
            yield unchecked(topic, reason(error), _ASK_ADMINISTRATOR)
            return
        raise
    if not quotas:
        yield passed(topic, f"{cluster.namespace} has none")
    for quota in quotas:
        yield _quota_line(quota)


def _quota_line(quota: Any) -> Line:
    from kubernetes.utils import parse_quantity

    hard, used = quota.status.hard or {}, quota.status.used or {}
    spent = [
        name for name in hard if parse_quantity(used.get(name, "0")) >= parse_quantity(hard[name])
    ]
    text = ", ".join(f"{name} {used.get(name, '0')} of {hard[name]}" for name in sorted(hard))
    if spent:
        return failed(
            "quota",
            f"{quota.metadata.name} has no {', '.join(sorted(spent))} left: {text}",
            "stop what is not needed there, or have the quota raised",
        )
    return passed("quota", f"{quota.metadata.name}: {text}")


def check_volume(cluster: Cluster) -> Line:
    """Check whether the volume for runs exists, and whether pods on all nodes can mount it.

    Raises:
        kubernetes.client.ApiException: the API server does not answer.
    """
    from kubernetes import client

    topic = "volume"
    try:
        claim = client.CoreV1Api(cluster.api).read_namespaced_persistent_volume_claim(
            NAME, cluster.namespace, _request_timeout=SECONDS
        )
    except client.ApiException as error:
        if status_of(error) == 404:
            return failed(topic, f"{cluster.namespace} has no claim {NAME}", APPLY)
        if status_of(error) == 403:
            return unchecked(topic, reason(error), "use an account that may read claims")
        raise
    modes = claim.status.access_modes or claim.spec.access_modes
    storage = claim.spec.storage_class_name
    text = f"{NAME}, {', '.join(modes)}, " + (f"class {storage}" if storage else "no class")
    if claim.status.phase != "Bound":
        return _unbound(cluster, text, storage)
    if "ReadWriteMany" not in modes and _nodes(cluster) != 1:
        return failed(
            topic,
            f"{text}: pods on other nodes cannot mount it",
            "use a storage class with ReadWriteMany (NFS, CephFS, EFS, Filestore); "
            "components/single-node is for clusters of one node",
        )
    return passed(topic, f"{text}, {claim.status.capacity['storage']}")


def _unbound(cluster: Cluster, text: str, storage: str | None) -> Line:
    from kubernetes import client

    topic = "volume"
    api = client.StorageV1Api(cluster.api)
    try:
        if storage:
            storage_class = api.read_storage_class(storage, _request_timeout=SECONDS)
            if storage_class.volume_binding_mode == "WaitForFirstConsumer":
                return unchecked(
                    topic,
                    f"{text}: its storage class binds it when the first pod starts",
                    "run it again after the first run",
                )
        classes = [item.metadata.name for item in all_items(api.list_storage_class)]
    except client.ApiException as error:
        if status_of(error) not in (403, 404):
            raise
        classes = []
    return failed(
        topic,
        f"{text}: not bound",
        "set storageClassName of the claim to a class with ReadWriteMany, or create a volume "
        f"for it; storage classes here: {', '.join(classes) or 'none visible'}",
    )


def _nodes(cluster: Cluster) -> int:
    """Return the number of nodes. 0 means that this account may not list them."""
    from kubernetes import client

    try:
        return len(all_items(client.CoreV1Api(cluster.api).list_node))
    except client.ApiException as error:
        if status_of(error) != 403:
            raise
        return 0
