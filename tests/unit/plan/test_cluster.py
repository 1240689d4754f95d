"""`steadytrain plan` for the GPUs of a cluster, and with this machine's own memory."""

from __future__ import annotations

import json

import psutil
import pytest
from typer.testing import CliRunner

from steadytrain.components.shared.cluster import Refused, Unreachable
from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines import cli

from support.kubernetes_server import kubernetes_server, node

NODES = "/api/v1/nodes"
A100 = {"product": "NVIDIA-A100-SXM4-80GB", "memory": "81920"}
T4 = {"product": "Tesla-T4", "memory": "15360"}
FEW = "data.source=[package:json]"
LARGE = "model.base=hub:meta-llama/Llama-3.1-70B"


@pytest.fixture
def answers(monkeypatch, tmp_path):
    with kubernetes_server() as answers:
        monkeypatch.setenv("KUBECONFIG", str(answers.kubeconfig(tmp_path / "config")))
        yield answers


def plan(*arguments, source="causal-lm", sets=()):
    few = [FEW] if source == "causal-lm" else []
    options = [text for item in (*few, *sets) for text in ("--set", item)]
    told = CliRunner().invoke(
        cli.app, ["plan", source, *arguments, *options, "--json", "--formula"]
    )
    if told.exception and not isinstance(told.exception, SystemExit):
        raise told.exception
    return json.loads(told.stdout), told.stderr


def test_plan_offers_only_the_clusters_gpus(answers):
    answers.listing(NODES, node("8", "900Gi", **A100), node("4", "180Gi", **T4), node())
    found, remarks = plan("--cluster")
    assert found["works"]
    offered = {offer["gpu"] for offer in found["cheapest"]}
    assert offered == {"A100-80", "T4"}
    assert found["hardware"]["gpu"] == found["cheapest"][0]["gpu"]
    assert found["hardware"]["chosen_by"] == "the cluster: its cheapest GPU that fits"
    assert not remarks


def test_only_gpus_of_the_cluster_can_be_picked(answers):
    answers.listing(NODES, node("8", "900Gi", **A100), node("4", "180Gi", **T4))
    found, _ = plan("--cluster", "--gpu", "a100")
    assert (found["hardware"]["gpu"], found["hardware"]["chosen_by"]) == ("A100-80", "given")
    assert found["hardware"]["host_memory"] == 900 * 2**30
    with pytest.raises(BadInput, match="--gpu H100: the cluster has none") as error:
        plan("--cluster", "--gpu", "h100")
    assert error.value.remedy.startswith("one of T4, A100-80")


def test_more_nodes_than_the_cluster_has_is_a_problem(answers):
    answers.listing(NODES, node("8", "900Gi", **A100), node("8", "900Gi", **A100))
    found, _ = plan("--cluster", "--nodes", "4", "--gpus-per-node", "4")
    assert "the nearest setting that works is compute.nodes=2" in found["problems"][0]
    assert plan("--cluster", "--nodes", "2", "--gpus-per-node", "4")[0]["works"]


def test_cordoned_nodes_do_not_count(answers):
    away = node("8", "900Gi", unschedulable=True, **A100), node("8", "9Gi", ready="False", **A100)
    answers.listing(NODES, node("1", "900Gi", **A100), *away)
    assert plan("--cluster")[0]["works"]
    found, _ = plan("--cluster", "--nodes", "2")
    assert "the cluster has 1 with 1 x A100-80" in found["problems"][0]


@pytest.mark.slow
def test_node_memory_bounds_offloading(answers):
    sizes = ("--cluster", "--gpus-per-node", "8")
    sets = (LARGE, "model.adapter.kind=none")
    answers.listing(NODES, node("8", "2000Gi", **A100))
    enough, _ = plan(*sizes, source="chat", sets=sets)
    assert enough["works"]
    assert enough["memory"]["host"] > 0
    limited, _ = plan(*sizes, source="chat", sets=(*sets, "compute.pods.memory=64Gi"))
    assert "that a pod can get there" in limited["problems"][0]
    answers.listing(NODES, node("8", "256Gi", **A100))
    short, _ = plan(*sizes, source="chat", sets=sets)
    assert "a node needs" in short["problems"][0]
    told, _ = plan(*sizes, "--host-memory-gb", "2200", source="chat", sets=sets)
    assert told["works"]
    assert told["hardware"]["host_memory"] == 2200 * 10**9


def test_only_schedulable_nodes_count(answers):
    answers.listing(NODES, node("8", "900Gi", **A100), node("4", "180Gi", **T4))
    selector = 'compute.pods.node_selector={"nvidia.com/gpu.product": "Tesla-T4"}'
    found, _ = plan("--cluster", sets=(selector,))
    assert [offer["gpu"] for offer in found["cheapest"]] == ["T4"]
    with pytest.raises(BadInput, match=r"none of the nodes with zone=b .*\(2 checked\)"):
        plan("--cluster", sets=("compute.pods.node_selector={zone: b}",))
    with pytest.raises(BadInput, match=r"offers amd\.com/gpu"):
        plan("--cluster", sets=("compute.pods.gpu_resource=amd.com/gpu",))


def test_cluster_without_gpus_gets_a_remedy(answers):
    answers.listing(NODES, node(), node())
    with pytest.raises(BadInput, match=r"offers nvidia\.com/gpu \(2 checked\)") as error:
        plan("--cluster")
    assert "--gpu h100" in error.value.remedy


def test_gpu_missing_from_the_table_is_skipped_and_reported(answers):
    odd = {"product": "NVIDIA-B999", "memory": "196608"}
    answers.listing(NODES, node("8", "900Gi", **odd), node("4", "180Gi", **T4), node("2"))
    found, remarks = plan("--cluster")
    assert found["hardware"]["gpu"] == "T4"
    assert "NVIDIA-B999 (206 GB)" in remarks
    assert "unknown GPU (memory not labeled)" in remarks
    answers.listing(NODES, node("8", "900Gi", **odd))
    with pytest.raises(BadInput, match=r"is in the plan's table: NVIDIA-B999 \(206 GB\)"):
        plan("--cluster")


def test_shared_gpus_are_counted_whole(answers):
    shared = {**T4, "product": "Tesla-T4-SHARED", "replicas": "4"}
    answers.listing(NODES, node("8", "180Gi", **shared))
    found, remarks = plan("--cluster", "--gpus-per-node", "2")
    assert found["works"]
    assert "shared by up to 4 pods" in remarks
    beyond, _ = plan("--cluster", "--gpus-per-node", "4")
    assert "at most 2 x T4" in beyond["problems"][0]


def test_mig_devices_of_both_strategies_are_planned_by_their_own_resource(answers):
    mixed = node("1", "900Gi", mig={"1g.10gb": "7", "3g.40gb": "2"}, **A100)
    answers.listing(NODES, mixed)
    every = plan("--cluster")[0]
    names = {offer["gpu"] for offer in (*every["cheapest"], *every["without_price"])}
    assert names == {"A100-80", "A100-80-MIG-1g.10gb", "A100-80-MIG-3g.40gb"}
    found, remarks = plan("--cluster", "--gpu", "a100-80-mig-1g.10gb")
    assert found["hardware"]["gpu"] == "A100-80-MIG-1g.10gb"
    assert resource_of(found) == "nvidia.com/mig-1g.10gb"
    assert not remarks
    # Complete GPUs alone have several ranks.
    several, _ = plan("--cluster", "--gpus-per-node", "2")
    assert several["hardware"]["gpu"] == "A100-80"
    single = {"product": "NVIDIA-H200-MIG-1g.18gb", "memory": "18432"}
    answers.listing(NODES, node("56", "900Gi", **single))
    found, _ = plan("--cluster")
    assert found["hardware"]["gpu"] == "H200-MIG-1g.18gb"
    assert resource_of(found) == "nvidia.com/gpu"
    with pytest.raises(BadInput, match="a process sees one MIG device"):
        plan("--cluster", "--gpus-per-node", "2")


def test_mig_devices_that_the_table_lacks_or_that_have_two_names_are_reported(answers):
    odd = node("4", "180Gi", mig={"1g.10gb.me": "1"}, **T4)
    product = {"product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "memory": "9984"}
    answers.listing(NODES, odd, node("7", "900Gi", **product))
    found, remarks = plan("--cluster", "--gpu", "t4")
    assert found["works"]
    assert "Tesla-T4-MIG-1g.10gb.me (memory not labeled): not in the plan's table" in remarks
    mixed = node("", "900Gi", mig={"1g.10gb": "7"}, **A100)
    answers.listing(NODES, mixed, node("7", "900Gi", **product))
    found, remarks = plan("--cluster")
    assert "offered by a second name" in remarks
    assert resource_of(found) == "nvidia.com/mig-1g.10gb"
    setting = "compute.pods.gpu_resource=nvidia.com/gpu"
    assert resource_of(plan("--cluster", sets=(setting,))[0]) == "nvidia.com/gpu"


def resource_of(found):
    """Return what the pods of training ask for."""
    return found["pipeline_config"]["deployment"]["training_pods"]["gpu_resource"]


def test_missing_permission_to_list_nodes_says_who_can_grant_it(answers):
    answers.of[NODES] = 403
    with pytest.raises(Refused, match="cannot read nodes of the whole cluster") as error:
        plan("--cluster")
    assert "ClusterRole" in error.value.remedy


def test_api_server_error_is_reported(answers):
    answers.of[NODES] = 503
    with pytest.raises(Unreachable) as error:
        plan("--cluster")
    assert error.value.remedy


def test_local_gpu_memory_counts(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own, _ = plan()
    assert own["hardware"]["gpu"] == "H100"
    assert 0 < own["hardware"]["host_memory"] <= psutil.virtual_memory().total
    named, _ = plan("--gpu", "h100")
    assert named["hardware"]["host_memory"] is None


@pytest.mark.slow
def test_plan_without_options_is_for_the_machine_that_run_would_use(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    own, told = plan(source="causal-lm")
    assert own["hardware"]["gpu"] == "CPU"
    assert "--gpu any" in told
    assert "assumed" in own["offer"]["timed_by"]
    chosen, _ = plan("--gpu", "any", source="causal-lm")
    assert chosen["hardware"]["gpu"] != "CPU"
    for setting in ("compute.nodes=2", "compute.launcher=trainjob", "compute.device=cuda"):
        elsewhere, _ = plan("--set", setting, source="causal-lm")
        assert elsewhere["hardware"]["gpu"] != "CPU", setting
