"""Clusters that tests can't have: with GPUs, many nodes, no Trainer, or few permissions."""

from __future__ import annotations

import pytest

from steadytrain.pipelines.cluster.access import open_cluster
from steadytrain.pipelines.cluster.capabilities import (
    check_gpus,
    check_kinds,
    check_quota,
    check_volume,
)
from steadytrain.pipelines.cluster.doctor import Questions, check_permissions, examine_cluster

from support.kubernetes_server import Answers, kubernetes_server, node
from support.ports import free_port

NODES = "/api/v1/nodes"
CLAIM = "/api/v1/namespaces/ours/persistentvolumeclaims/steadytrain"
CLASS = "/apis/storage.k8s.io/v1/storageclasses"


@pytest.fixture
def answers(monkeypatch, tmp_path):
    with kubernetes_server() as answers:
        monkeypatch.setenv("KUBECONFIG", str(answers.kubeconfig(tmp_path / "config")))
        yield answers


def claim(phase="Bound", mode="ReadWriteMany", storage_class="fast"):
    return {
        "metadata": {},
        "spec": {"accessModes": [mode], "storageClassName": storage_class},
        "status": {"phase": phase, "accessModes": [mode], "capacity": {"storage": "100Gi"}},
    }


def offer(answers, **groups):
    """Make the API server list these groups, each with a version and its resource names."""
    listed = []
    for name, (version, *plurals) in groups.items():
        group = {"trainer": "trainer.kubeflow.org", "kubeflow": "kubeflow.org"}.get(name, name)
        group = {"argo": "argoproj.io", "jobset": "jobset.x-k8s.io"}.get(group, group)
        group = {"kueue": "kueue.x-k8s.io"}.get(group, group)
        listed.append({"name": group, "versions": [{"version": version}]})
        resources = [{"name": plural} for plural in plurals]
        answers.of[f"/apis/{group}/{version}"] = {"resources": resources}
    answers.of["/apis"] = {"groups": listed}


def kinds():
    return {line.topic: line for line in check_kinds(open_cluster("ours"))}


ARGO = ("v1alpha1", "workflows")
TRAINER = ("v1alpha1", "trainjobs", "trainingruntimes")


def test_gpus_are_counted_by_make_with_their_memory(answers):
    a100 = {"product": "NVIDIA-A100-SXM4-80GB", "memory": "81920"}
    answers.listing(
        NODES,
        node(),
        node("8", **a100),
        node("8", **a100),
        node("4", unschedulable=True),
        node("4", ready="Unknown"),
        node("1"),
        node("8", product="Tesla-T4-SHARED", memory="15360", replicas="4"),
    )
    text = check_gpus(open_cluster("ours")).text
    assert text == (
        "16 x NVIDIA-A100-SXM4-80GB (85.9 GB), 2 x Tesla-T4 (16.1 GB), "
        "1 x unknown GPU (memory not labeled)"
    )


def test_mig_devices_are_counted_and_an_unfinished_division_fails(answers):
    a100 = {"product": "NVIDIA-A100-SXM4-80GB", "memory": "81920"}
    divided = {"mig.config": "all-1g.10gb", "mig.config.state": "success"}
    memory = {"mig-1g.10gb.memory": "9984"}
    answers.listing(NODES, node("1", mig={"1g.10gb": "7"}, **a100, **divided, **memory))
    line = check_gpus(open_cluster("ours"))
    mig = "7 x NVIDIA-A100-SXM4-80GB-MIG-1g.10gb (10.5 GB)"
    assert (line.state, line.text) == ("pass", f"{mig}, 1 x NVIDIA-A100-SXM4-80GB (85.9 GB)")
    answers.listing(NODES, node("1", **a100, **divided | {"mig.config.state": "failed"}))
    line = check_gpus(open_cluster("ours"))
    assert line.state == "fail"
    assert "1 nodes with nvidia.com/mig.config all-1g.10gb in state failed" in line.text


def test_nodes_are_skipped_without_permission(answers):
    answers.of[NODES] = 403
    assert check_gpus(open_cluster("ours")).state == "not asked"


def test_trainer_with_kueue_passes(answers):
    offer(answers, trainer=TRAINER, argo=ARGO, jobset=("v1alpha2", "jobsets"), kueue=("v1beta1",))
    found = kinds()
    assert {line.state for line in found.values()} == {"pass"}
    assert found.keys() == {"TrainJob", "JobSet", "Workflow", "Kueue"}


def test_pytorchjob_suffices_without_trainer(answers):
    offer(answers, kubeflow=("v1", "pytorchjobs"), argo=ARGO)
    found = kinds()
    assert found["TrainJob"].state == "not asked"
    assert found["PyTorchJob"].state == "pass"


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        ({"kubeflow": ("v1", "pytorchjobs")}, "pytorchjobs"),
        ({"kubeflow": ("v1", "pytorchjobs"), "trainer": TRAINER}, "trainjobs"),
        ({}, "trainjobs"),
    ],
)
def test_rights_are_checked_for_the_job_kind_in_use(answers, groups, kind):
    offer(answers, **groups)
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answers.of[reviews] = {"spec": {}, "status": {"allowed": True}}
    lines = list(check_permissions(open_cluster("ours"), ""))
    assert {line.state for line in lines} == {"pass"}
    assert lines[0].topic == f"may {kind}"


def test_missing_or_unknown_operator_fails_with_a_remedy(answers):
    offer(answers, argo=ARGO)
    assert kinds()["TrainJob"].state == "fail"
    offer(answers, trainer=("v2", "trainjobs"))
    found = kinds()
    assert "offers v2, v1alpha1 is needed" in found["TrainJob"].text
    assert "install Kubeflow Trainer 2" in found["TrainJob"].remedy
    assert found["Workflow"].state == "fail"


def test_trainer_without_jobset_fails(answers):
    offer(answers, trainer=TRAINER, argo=ARGO)
    assert kinds()["JobSet"].state == "fail"


@pytest.mark.parametrize(
    ("mode", "nodes", "state"),
    [
        ("ReadWriteMany", 2, "pass"),
        ("ReadWriteOnce", 1, "pass"),
        ("ReadWriteOnce", 2, "fail"),
        ("ReadWriteOnce", None, "fail"),
    ],
)
def test_volume_must_be_mounted_by_every_node(answers, mode, nodes, state):
    answers.of[CLAIM] = claim(mode=mode)
    if nodes is None:
        answers.of[NODES] = 403
    else:
        answers.listing(NODES, *[node()] * nodes)
    assert check_volume(open_cluster("ours")).state == state


def test_wait_for_first_consumer_is_not_a_failure(answers):
    answers.of[CLAIM] = claim("Pending")
    answers.of[f"{CLASS}/fast"] = {
        "metadata": {},
        "provisioner": "x",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    assert check_volume(open_cluster("ours")).state == "not asked"


def test_claim_without_a_class_lists_the_storage_classes(answers):
    answers.of[CLAIM] = claim("Pending", storage_class=None)
    answers.listing(CLASS, {"metadata": {"name": "nfs"}, "provisioner": "x"})
    line = check_volume(open_cluster("ours"))
    assert line.state == "fail"
    assert "classes here: nfs" in line.remedy


def test_forbidden_objects_are_skipped(answers):
    answers.of[CLAIM] = answers.of["/api/v1/namespaces/ours/resourcequotas"] = 403
    assert check_volume(open_cluster("ours")).state == "not asked"
    assert [line.state for line in check_quota(open_cluster("ours"))] == ["not asked"]


def test_quotas_are_compared_as_quantities(answers):
    status = {"hard": {"requests.memory": "2Gi"}, "used": {"requests.memory": "1900Mi"}}
    quota = {"metadata": {"name": "q"}, "status": status}
    answers.listing("/api/v1/namespaces/ours/resourcequotas", quota)
    assert [line.state for line in check_quota(open_cluster("ours"))] == ["pass"]
    status["used"] = {"requests.memory": "2048Mi"}
    (line,) = check_quota(open_cluster("ours"))
    assert "no requests.memory left" in line.text


def states(**fields):
    asked = Questions(image="a:1", step_image="b:1", **fields)
    return {line.topic: line for line in examine_cluster(asked)}


def test_missing_api_server_is_reported_and_the_other_checks_still_run(monkeypatch, tmp_path):
    config = Answers(free_port()).kubeconfig(tmp_path / "config")
    monkeypatch.setenv("KUBECONFIG", str(config))
    found = states()
    assert found["cluster"].state == "fail"
    assert "no answer from the API server" in found["cluster"].text
    assert found["S3"].state == "not asked"


def test_missing_cluster_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    line = states()["cluster"]
    assert line.state == "fail"
    assert "KUBECONFIG" in line.remedy


def test_wrong_credentials_are_reported(answers):
    answers.of["/version"] = 401
    line = states(namespace="ours")["cluster"]
    assert line.state == "fail"
    assert "credentials" in line.remedy


def test_one_broken_response_does_not_stop_other_checks(answers):
    answers.of["/version"] = {"gitVersion": "v1.34.0"}
    answers.of["/api/v1/namespaces/ours"] = 403
    offer(answers, argo=ARGO)
    answers.of[NODES] = 500
    found = states(namespace="ours")
    assert found["cluster"].state == "pass"
    assert found["GPUs"].state == found["permissions"].state == "fail"
    assert found["Workflow"].state == "pass"
