"""What the admission policy lets the launcher's account create: what it needs, and nothing worse.

Each abuse is one change to what the launcher creates, sent by the same account as a dry run. The
API server's answer comes from the policy.
"""

from __future__ import annotations

import copy
import secrets

import pytest
import yaml

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.cluster import Cluster, Refused
from steadytrain.components.shared.config import ComputeConfig, RecoveryConfig
from steadytrain.components.shared.environment import TRAIN_IMAGE
from steadytrain.components.train.attempt import AttemptSpec
from steadytrain.components.train.launch.job import PYTORCH_JOB, PyTorchJob, TrainJob
from steadytrain.components.train.launch.naming import attempt_labels, job_name
from steadytrain.components.train.launch.own_pod import OwnPod
from steadytrain.pipelines.cluster.doctor import PYTORCHJOB_RIGHTS
from steadytrain.pipelines.pod_names import NAME

from support.command import wait_for
from support.manifests import build
from support.namespaces import (
    apply,
    as_account,
    in_namespace,
    kubectl,
    needs_cluster,
    own_namespace,
)

pytestmark = needs_cluster

ACCOUNT = "pipeline-runner"
OTHER = {"secretKeyRef": {"name": "another", "key": "password"}}


@pytest.fixture(scope="module")
def account(tmp_path_factory):
    """Yield a connection to the cluster as the launcher's account, with the policy in force."""
    with own_namespace("admission") as namespace:
        for name in (ACCOUNT, "steadytrain-trainer", "powerful"):
            kubectl("create", "serviceaccount", name, "-n", namespace)
        objects = in_namespace(build("standalone", (), tmp_path_factory.mktemp("built")), namespace)
        kinds = ("Role", "RoleBinding", "ValidatingAdmissionPolicy")
        apply([item for item in objects if item["kind"].startswith(kinds)])
        seen = as_account(ACCOUNT, namespace)
        until_it_holds(seen)
        yield seen


def until_it_holds(account):
    """Wait until the API server enforces the policy, which takes a moment."""
    abuse = changed(job(), "spec.containers.0.image", "none.test/evil:1")
    wait_for(lambda: "ValidatingAdmissionPolicy" in refusal(account, abuse))


def refusal(account, manifests):
    """Return the API server's reason for refusing the manifests, or "" if it accepts them."""
    try:
        create(account, manifests)
    except Refused as error:
        return str(error)
    return ""


def job(kind=TrainJob, **pods):
    """Return the manifests that the launcher creates, including the fields from a step's pod."""
    spec = AttemptSpec(
        attempt=1,
        run_id="abuse",
        config="",
        data="",
        batch=BatchSettings(1),
        gradient_accumulation_steps=1,
    )
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": NAME}}
    own = OwnPod(
        image=f"docker.io/{TRAIN_IMAGE}",
        volumes=[claim, {"name": "ca", "configMap": {"name": "ca"}}],
        mounts=[{"name": "data", "mountPath": "/mnt"}, {"name": "ca", "mountPath": "/ca"}],
        env=[
            {"name": "PLAIN", "value": "1"},
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": NAME, "key": "HF_TOKEN", "optional": True}},
            },
        ],
        env_from=[{"secretRef": {"name": NAME}}],
        identity={"runAsUser": 1000, "fsGroup": 1000},
        pull_secrets=[{"name": "registry"}],
    )
    return kind(
        name=f"{job_name('abuse', 1)}-{secrets.token_hex(3)}",
        folder="/mnt/steadytrain/runs/abuse/attempts/0001",
        labels=attempt_labels(spec),
        command=["true"],
        compute=ComputeConfig(device="cpu", nodes=2, pods=pods),
        recovery=RecoveryConfig(),
        own=own,
    ).manifests()


def pod_template(manifest):
    """Return the pod template of a runtime or a PyTorchJob."""
    spec = manifest["spec"]
    if manifest["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]
    return spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def changed(manifests, path, value):
    """Return a copy with one value of the pod template changed; the TrainJob is unchanged."""
    made = copy.deepcopy([*manifests])
    at = next(pod_template(item) for _, item in made if item["kind"] != "TrainJob")
    *way, last = path.split(".")
    for name in way:
        at = at[int(name)] if name.isdigit() else at.setdefault(name, {})
    if isinstance(at, list):
        at.append(value)
    else:
        at[last] = value
    return made


def create(account, manifests, *, dry=True):
    """Create the manifests as the account; a dry run creates nothing."""
    cluster, query = Cluster(account.client, account.namespace), [("dryRun", "All")] if dry else []
    for kind, manifest in manifests:
        cluster._call("POST", cluster._path(kind), body=manifest, what=kind.name, query=query)


@pytest.mark.parametrize(
    "pods",
    [
        {},
        {"service_account": "steadytrain-trainer"},
        {"gpus": 2, "tolerations": [{"operator": "Exists"}], "node_selector": {"a": "b"}},
    ],
    ids=["plain", "account", "placed"],
)
def test_launcher_jobs_are_admitted(account, pods):
    runtime, trainjob = job(**pods)
    # Trainer's webhook refuses a job whose runtime doesn't exist, and sees new runtimes with a
    # delay.
    create(account, [runtime], dry=False)
    wait_for(lambda: not refusal(account, [trainjob]))


CONTEXT = "spec.containers.0.securityContext"
ABUSES = {
    "image": ("spec.containers.0.image", "none.test/evil:1"),
    "image-prefix": ("spec.containers.0.image", "steadytrain/train-evil:1"),
    "no-image": ("spec.containers.0.image", ""),
    "init-container": (
        "spec.initContainers",
        [{"name": "first", "image": "none.test/evil:1", "command": ["true"]}],
    ),
    "account": ("spec.serviceAccountName", "powerful"),
    "own-account": ("spec.serviceAccountName", ACCOUNT),
    "deprecated-account": ("spec.serviceAccount", "powerful"),
    "token": ("spec.automountServiceAccountToken", True),
    "host-network": ("spec.hostNetwork", True),
    "host-pid": ("spec.hostPID", True),
    "host-ipc": ("spec.hostIPC", True),
    "host-path": ("spec.volumes.-1", {"name": "root", "hostPath": {"path": "/"}}),
    "secret-volume": ("spec.volumes.-1", {"name": "other", "secret": {"secretName": "another"}}),
    "token-volume": (
        "spec.volumes.-1",
        {
            "name": "token",
            "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]},
        },
    ),
    "secret-variable": ("spec.containers.0.env.-1", {"name": "STOLEN", "valueFrom": OTHER}),
    "secret-variables": ("spec.containers.0.envFrom", [{"secretRef": {"name": "another"}}]),
    "privileged": (f"{CONTEXT}.privileged", True),
    "escalation": (f"{CONTEXT}.allowPrivilegeEscalation", True),
    "root": (f"{CONTEXT}.runAsUser", 0),
    "root-pod": ("spec.securityContext.runAsUser", 0),
    "root-allowed": ("spec.securityContext.runAsNonRoot", False),
    "capability": (f"{CONTEXT}.capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    "capabilities-kept": (f"{CONTEXT}.capabilities", {}),
    "seccomp": (f"{CONTEXT}.seccompProfile", {"type": "Unconfined"}),
    "no-context": (CONTEXT, None),
    "host-port": ("spec.containers.0.ports", [{"containerPort": 80, "hostPort": 80}]),
}


@pytest.mark.parametrize("abuse", ABUSES)
def test_launcher_account_may_not_request_more(account, abuse):
    told = refusal(account, changed(job(), *ABUSES[abuse]))
    assert "ValidatingAdmissionPolicy" in told


@pytest.mark.parametrize(
    "change",
    [
        {"trainer": {"image": "none.test/evil:1"}},
        {"trainer": {"env": [{"name": "STOLEN", "valueFrom": OTHER}]}},
        {"runtimeRef": {"kind": "ClusterTrainingRuntime", "name": "torch-distributed"}},
        {
            "podSpecOverrides": [
                {"targetJobs": [{"name": "node"}], "serviceAccountName": "powerful"}
            ]
        },
        {"initializer": {"dataset": {"storageUri": "hf://x", "secretRef": {"name": "another"}}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_trainjob_may_not_bypass_its_runtime(account, change):
    made = copy.deepcopy([*job()])
    spec = made[-1][1]["spec"]
    for name, value in change.items():
        spec[name] = {**spec[name], **value} if isinstance(spec.get(name), dict) else value
    assert "ValidatingAdmissionPolicy" in refusal(account, made[-1:])


def test_administrator_is_exempt(account):
    (_, runtime), _ = changed(job(), *ABUSES["host-network"])
    text = yaml.safe_dump(runtime)
    kubectl("apply", "--dry-run=server", "-n", account.namespace, "-f", "-", content=text)


def test_policy_refers_only_to_existing_fields(account):
    """The API server reports CEL type errors; ignore the ones about kinds that it doesn't serve."""
    told = kubectl("get", "validatingadmissionpolicies", "-o", "yaml")
    (policy,) = (
        item
        for item in yaml.safe_load(told)["items"]
        if item["metadata"]["name"].endswith(account.namespace)
    )
    warnings = policy.get("status", {}).get("typeChecking", {}).get("expressionWarnings", [])
    assert not [one for one in warnings if "undefined field" not in one["warning"]], warnings


@pytest.fixture(scope="module")
def pytorchjobs(account):
    """Serve the PyTorchJob kind like the training operator's CRD, which keeps unknown fields."""
    if account.offers(PYTORCH_JOB):
        yield
        return
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": PYTORCH_JOB.version, "served": True, "storage": True}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PYTORCH_JOB.plural}.{PYTORCH_JOB.group}"},
        "spec": {
            "group": PYTORCH_JOB.group,
            "names": {"kind": PYTORCH_JOB.name, "plural": PYTORCH_JOB.plural},
            "scope": "Namespaced",
            "versions": [{**served, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    apply([definition])
    name = definition["metadata"]["name"]
    try:
        kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=60s")
        role = in_role(PYTORCHJOB_RIGHTS[0])
        apply(
            [
                {**item, "metadata": {**item["metadata"], "namespace": account.namespace}}
                for item in role
            ]
        )
        yield
    finally:
        kubectl("delete", "crd", name)


def in_role(right):
    """Grant the account one right with a Role and a RoleBinding."""
    rule = {"apiGroups": [right.group], "resources": [right.resource], "verbs": [*right.verbs]}
    api = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": ACCOUNT}
    reference = {"apiGroup": api, "kind": "Role", "name": "more"}
    role = {"apiVersion": f"{api}/v1", "metadata": {"name": "more"}}
    return [
        {**role, "kind": "Role", "rules": [rule]},
        {**role, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]},
    ]


@pytest.mark.usefixtures("pytorchjobs")
def test_launcher_pytorchjobs_are_admitted(account):
    # The new right and the new kind take a moment to take effect.
    wait_for(lambda: refusal(account, job(PyTorchJob)) == "")


@pytest.mark.usefixtures("pytorchjobs")
@pytest.mark.parametrize("abuse", ABUSES)
def test_pytorchjob_may_not_request_more(account, abuse):
    told = refusal(account, changed(job(PyTorchJob), *ABUSES[abuse]))
    assert "ValidatingAdmissionPolicy" in told
