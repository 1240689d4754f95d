"""The objects of an attempt: what Trainer and Kubernetes receive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import ConfigError
from steadytrain.components.train.launch.evidence import node_of
from steadytrain.components.train.launch.own_pod import OwnPod
from steadytrain.components.train.launch.pytorchjob import PyTorchJob

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


def test_pods_of_a_group_restart_together(job):
    template = runtime(job())["spec"]["template"]["spec"]
    (replicated,) = template["replicatedJobs"]
    assert template["failurePolicy"] == {"maxRestarts": 0}
    assert replicated["template"]["spec"]["backoffLimit"] == 0
    assert pod_spec(job())["restartPolicy"] == "Never"


def test_trainer_finds_the_training_container(job):
    (replicated,) = runtime(job())["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["name"] == container(job())["name"] == "node"
    made = job(nproc_per_node=4)
    trainer, reference = (train_job(made)["spec"][name] for name in ("trainer", "runtimeRef"))
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert (reference["kind"], reference["name"]) == ("TrainingRuntime", "tiny-a3")
    assert runtime(made)["metadata"]["name"] == train_job(made)["metadata"]["name"] == "tiny-a3"


def test_pod_passes_restricted_pod_security(job):
    context = container(job())["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["runAsNonRoot"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod_spec(job())["automountServiceAccountToken"] is False
    mounts = {item["mountPath"] for item in container(job())["volumeMounts"]}
    assert {"/tmp", "/dev/shm"} <= mounts


def test_grace_period_exceeds_the_ranks_own(job):
    made = job(recovery={"stop_grace_seconds": 100.5})
    assert pod_spec(made)["terminationGracePeriodSeconds"] > 100.5


def test_shared_memory_is_memory(job):
    volumes = {
        item["name"]: item for item in pod_spec(job(pods={"shared_memory": "3Gi"}))["volumes"]
    }
    assert volumes["steadytrain-shared-memory"]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "3Gi",
    }


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


def test_memory_request_equals_its_limit(job):
    made = job(pods={"memory": "7Gi", "cpu": 3})
    resources = train_job(made)["spec"]["trainer"]["resourcesPerNode"]
    disk = "ephemeral-storage"
    assert resources["limits"] == {"memory": "7Gi", disk: "50Gi"}
    assert resources["requests"] == {"memory": "7Gi", "cpu": "3", disk: "0"}


def test_tmp_size_is_limited(job):
    """Otherwise one run's downloads could fill the disk of a shared node."""
    made = job(pods={"temporary_storage": "3Gi"})
    volumes = {item["name"]: item for item in pod_spec(made)["volumes"]}
    assert volumes["steadytrain-tmp"]["emptyDir"] == {"sizeLimit": "3Gi"}
    limits = train_job(made)["spec"]["trainer"]["resourcesPerNode"]["limits"]
    assert limits["ephemeral-storage"] == "3Gi"


def test_placement_follows_the_configuration(job):
    toleration = {"key": "spot", "operator": "Exists"}
    made = job(
        pods={
            "node_selector": {"gpu": "a100"},
            "tolerations": [toleration],
            "affinity": {"nodeAffinity": {}},
            "priority_class": "high",
            "service_account": "trainer",
            "labels": {"kueue.x-k8s.io/queue-name": "team", "steadytrain.io/run": "not this"},
            "image": "mine:2",
        }
    )
    spec = pod_spec(made)
    assert spec["nodeSelector"] == {"gpu": "a100"}
    assert spec["tolerations"] == [toleration]
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["priorityClassName"] == "high"
    assert spec["serviceAccountName"] == "trainer"
    labels = train_job(made)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team"
    assert labels["steadytrain.io/run"] == "tiny"
    assert train_job(made)["spec"]["trainer"]["image"] == "mine:2"


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


def test_unset_fields_are_left_to_the_cluster(job):
    spec = pod_spec(job())
    assert "priorityClassName" not in spec
    assert "serviceAccountName" not in spec


def test_labels_identify_the_run(job):
    (replicated,) = runtime(job())["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["spec"]["template"]["metadata"]["labels"]
    assert labels["steadytrain.io/run"] == "tiny"
    assert labels["steadytrain.io/attempt"] == "3"
    assert labels["steadytrain.io/generation"] == "2"


def test_workflow_owns_the_job_without_blocking_deletion(job):
    made = job(own=OwnPod.of(OWN))
    for manifest in (train_job(made), runtime(made)):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "name": "run-xyz",
            "uid": "1-2-3",
        }


def test_shareable_settings_of_the_steps_pod_are_passed_on():
    own = OwnPod.of(OWN)
    assert own.image == "train:1"
    assert own.labels == {"pipeline/runid": "0a1b"}
    assert [item["name"] for item in own.volumes] == ["shared", "keys"]
    assert [item["mountPath"] for item in own.mounts] == ["/data", "/keys"]
    assert [item["name"] for item in own.env] == ["AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"]
    assert own.identity == {"fsGroup": 1000, "runAsUser": 1000}
    assert own.pull_secrets == [{"name": "registry"}]


def test_secrets_stay_references(job):
    made = container(job(own=OwnPod.of(OWN)))
    secrets = [item for item in made["env"] if "secretKeyRef" in item.get("valueFrom", {})]
    assert secrets == [OWN["spec"]["containers"][1]["env"][3]]
    assert made["envFrom"] == [{"secretRef": {"name": "more"}}]


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


def pytorch(job, **compute):
    ((kind, manifest),) = job(kind=PyTorchJob, **compute).manifests()
    assert (kind.plural, manifest["apiVersion"]) == ("pytorchjobs", "kubeflow.org/v1")
    return manifest


def workers(job, **compute):
    """Return the workers of a PyTorchJob, which are its only replicas."""
    (replicas,) = pytorch(job, **compute)["spec"]["pytorchReplicaSpecs"].items()
    assert replicas[0] == "Worker"
    return replicas[1]


def test_pytorchjob_has_a_worker_per_node(job):
    spec = pytorch(job, nodes=4, nproc_per_node=2)["spec"]
    assert spec["nprocPerNode"] == "2"
    assert spec["runPolicy"]["backoffLimit"] == 0
    made = workers(job, nodes=4)
    assert (made["replicas"], made["restartPolicy"]) == (4, "Never")
    (container,) = made["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["command"] == ["python", "-m", "agent"]
    assert container["resources"]["limits"] == {"memory": "16Gi", "ephemeral-storage": "50Gi"}


def test_pods_know_the_master_and_their_index(job):
    manifest = pytorch(job, nodes=2)
    (container,) = workers(job, nodes=2)["template"]["spec"]["containers"]
    told = {item["name"]: item for item in container["env"]}
    assert told["PET_MASTER_ADDR"]["value"] == f"{manifest['metadata']['name']}-worker-0"
    label = "metadata.labels['training.kubeflow.org/replica-index']"
    assert told["PET_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == label


def test_pods_are_distinguished_by_their_labels():
    labels = {"training.kubeflow.org/replica-index": "2"}
    assert node_of({"metadata": {"labels": labels}}) == 2


def test_both_job_kinds_request_the_same_pods(job):
    spec, other = workers(job, nodes=1)["template"]["spec"], pod_spec(job(nodes=1))
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
