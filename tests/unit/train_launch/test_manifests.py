"""The objects of an attempt: what Trainer and Kubernetes receive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.train.launch.evidence import node_of
from steadytrain.components.train.launch.job import PyTorchJob
from steadytrain.components.train.launch.own_pod import OwnPod

from support.golden import assert_golden

OWN = {
    "metadata": {
        "labels": {"pipeline/runid": "0a1b", "other": "x"},
        "ownerReferences": [
            {
                "apiVersion": "argoproj.io/v1alpha1",
                "kind": "Workflow",
                "name": "run-xyz",
                "uid": "1-2-3",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    },
    "spec": {
        "securityContext": {"runAsUser": 0, "fsGroup": 1000, "runAsNonRoot": True},
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": "steadytrain"}},
            {"name": "unused", "persistentVolumeClaim": {"claimName": "another"}},
            {"name": "keys", "secret": {"secretName": "s3"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "token", "projected": {"sources": []}},
        ],
        "containers": [
            {"name": "wait", "image": "argo:1"},
            {
                "name": "main",
                "image": "train:1",
                "securityContext": {"runAsUser": 1000},
                "envFrom": [{"secretRef": {"name": "more"}}],
                "env": [
                    {"name": "KFP_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
                    {"name": "MY_POD", "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
                    {"name": "ARGO_TEMPLATE", "value": "{}"},
                    {
                        "name": "AWS_SECRET_ACCESS_KEY",
                        "valueFrom": {"secretKeyRef": {"name": "s3", "key": "secret"}},
                    },
                    {"name": "AWS_ENDPOINT_URL", "value": "http://s3"},
                ],
                "volumeMounts": [
                    {"name": "shared", "mountPath": "/data"},
                    {"name": "keys", "mountPath": "/keys", "readOnly": True},
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "token", "mountPath": "/token"},
                ],
            },
        ],
    },
}


CONFIGURED = {
    "device": "cuda",
    "nproc_per_node": 4,
    "pods": {
        "cpu": 3,
        "memory": "7Gi",
        "shared_memory": "3Gi",
        "temporary_storage": "4Gi",
        "node_selector": {"gpu": "a100"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priority_class": "high",
        "service_account": "trainer",
        "labels": {"kueue.x-k8s.io/queue-name": "team", "steadytrain.io/run": "not this"},
        "image": "mine:2",
    },
    "recovery": {"stop_grace_seconds": 100.5},
}
JOBS = {
    "trainjob": {},
    "trainjob-configured": {"own": OwnPod.of(OWN), **CONFIGURED},
    "pytorchjob": {"kind": PyTorchJob, "nodes": 4, "nproc_per_node": 2},
}


@pytest.mark.parametrize("name", JOBS)
def test_manifests_equal_the_golden_file(job, name):
    """REWRITE_GOLDEN=1 replaces the files; read what has changed.

    Pods of a group restart together and end after their ranks. They meet the Pod Security level
    `restricted`. One run's downloads cannot fill the disk of a shared node, secrets stay
    references, and the workflow owns the job without blocking its deletion.
    """
    made = job(**JOBS[name])
    text = yaml.safe_dump_all(manifest for _, manifest in made.manifests())
    golden = Path(__file__).parent / "golden" / f"{name}.yaml"
    assert_golden(golden, text.replace(made.folder, "FOLDER"))


def train_job(job):
    return job.manifests()[1][1]


def runtime(job):
    return job.manifests()[0][1]


def pod_spec(job):
    (replicated,) = runtime(job)["spec"]["template"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]["template"]["spec"]


def container(job):
    (found,) = pod_spec(job)["containers"]
    return found


@pytest.mark.parametrize(
    ("compute", "gpus"),
    [
        ({"device": "cuda", "nproc_per_node": 4}, "4"),
        ({"device": "cuda", "pods": {"gpus": 8}}, "8"),
        ({"device": "cpu"}, None),
        ({"device": "auto"}, None),
    ],
)
def test_each_rank_has_its_own_gpu(job, compute, gpus):
    resources = train_job(job(**compute))["spec"]["trainer"]["resourcesPerNode"]
    assert resources["limits"].get("nvidia.com/gpu") == gpus
    assert resources["requests"].get("nvidia.com/gpu") == gpus


def test_spot_toleration_is_omitted_for_an_on_demand_attempt(job):
    spot = {
        "node_selector": {"capacity": "spot"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
    }
    pods = {"node_selector": {"gpu": "a100"}, "tolerations": [{"key": "gpu"}], "spot": spot}
    made = job(pods=pods)
    assert pod_spec(made)["nodeSelector"] == {"gpu": "a100", "capacity": "spot"}
    assert pod_spec(made)["tolerations"] == [{"key": "gpu"}, *spot["tolerations"]]
    safe = pod_spec(replace(made, on_demand=True))
    assert safe["nodeSelector"] == {"gpu": "a100"}
    assert safe["tolerations"] == [{"key": "gpu"}]


def test_shareable_settings_of_the_steps_pod_are_passed_on():
    own = OwnPod.of(OWN)
    assert own.image == "train:1"
    assert own.labels == {"pipeline/runid": "0a1b"}
    assert [item["name"] for item in own.volumes] == ["shared", "keys"]
    assert [item["mountPath"] for item in own.mounts] == ["/data", "/keys"]
    assert [item["name"] for item in own.env] == ["AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"]
    assert own.identity == {"fsGroup": 1000, "runAsUser": 1000}
    assert own.pull_secrets == [{"name": "registry"}]


def test_ranks_do_not_get_the_webhook(job):
    own = OwnPod(image="own:1", env=[{"name": "STEADYTRAIN_WEBHOOK_URL", "valueFrom": {}}])
    assert [item["name"] for item in container(job(own=own))["env"]] == ["HOME"]


def test_no_variable_is_set_twice(job):
    own = OwnPod(image="own:1", env=[{"name": "HOME", "value": "/home/me"}])
    assert container(job(own=own))["env"] == [{"name": "HOME", "value": "/home/me"}]


def test_claims_can_be_named(job):
    made = job(own=OwnPod.of(OWN), pods={"volumes": [{"claim": "fast", "path": "/fast"}]})
    claims = [item for item in pod_spec(made)["volumes"] if "persistentVolumeClaim" in item]
    assert [item["persistentVolumeClaim"]["claimName"] for item in claims] == ["fast"]
    assert container(made)["volumeMounts"][-1] == {"name": claims[0]["name"], "mountPath": "/fast"}


def test_pods_are_distinguished_by_their_labels():
    labels = {"training.kubeflow.org/replica-index": "2"}
    assert node_of({"metadata": {"labels": labels}}) == 2


def test_both_job_kinds_request_the_same_pods(job):
    ((kind, manifest),) = job(kind=PyTorchJob, nodes=1).manifests()
    assert kind.plural == "pytorchjobs"
    spec = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    other = pod_spec(job(nodes=1))
    assert {**spec, "containers": []} == {**other, "containers": []}


def test_configured_variables_reach_the_pods_and_secrets_stay_references(job):
    reference = {"secretKeyRef": {"name": "proxy", "key": "password"}}
    env = [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "HTTPS_PROXY", "valueFrom": reference},
        {"name": "AWS_ENDPOINT_URL", "value": "http://s3"},
    ]
    own = OwnPod(image="own:1", env=[{"name": "AWS_ENDPOINT_URL", "value": "http://other"}])
    found = container(job(own=own, pods={"env": env}))["env"]
    assert [item for item in found if item["name"] != "HOME"][: len(env)] == [env[2], *env[:2]]


@pytest.mark.parametrize(
    "name", ["HOME", "PET_NNODES", "RANK", "OMP_NUM_THREADS", "KFP_POD_NAME", "STEADYTRAIN_X"]
)
def test_variable_that_others_set_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"'{name}': is set by steadytrain or by the cluster"):
        load("causal-lm", {"compute.pods.env": [{"name": name, "value": "1"}]})


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ([{"name": "A"}], "either value or valueFrom"),
        ([{"name": "A", "value": "1"}, {"name": "A", "value": "2"}], "A occurs twice"),
        ([{"name": "HF_TOKEN", "value": "plain"}], "contains a secret"),
        ([{"name": "A", "value": "http://me:secret@proxy"}], "contains a secret"),
    ],
)
def test_variable_that_cannot_be_used_is_refused(env, problem):
    with pytest.raises(ConfigError, match=problem):
        load("causal-lm", {"compute.pods.env": env})
