"""A plan on a real cluster: the hardware of its nodes, and the API server's check of a plan."""

from __future__ import annotations

import contextlib
import json

import yaml
from typer.testing import CliRunner

from steadytrain.components.shared.cluster import Refused
from steadytrain.pipelines import cli

from support.namespaces import kubectl, needs_cluster, own_namespace

pytestmark = needs_cluster


def test_planned_trainjob_is_accepted(tmp_path):
    arguments = ["plan", "causal-lm", "--gpu", "h100", "--gpus-per-node", "8", "--nodes", "2"]
    told = CliRunner().invoke(cli.app, [*arguments, "--write", str(tmp_path)])
    assert told.exit_code == 0, told.output
    file = tmp_path / "trainjob.yaml"
    with own_namespace("plan") as namespace:
        # Not a dry run, because the dry run of the job requires an existing runtime.
        made = kubectl("apply", "-n", namespace, "-f", file)
    assert made.count("created") == 2


LABELS = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920"}
GPU = "nvidia.com/gpu"


@contextlib.contextmanager
def gpus_on_a_node(core, count):
    """Make a node offer GPUs, as a device plugin would. It has none, and no pod requests them."""
    name = core.list_node().items[0].metadata.name
    offered = {"capacity": {GPU: str(count)}, "allocatable": {GPU: str(count)}}
    core.patch_node(name, {"metadata": {"labels": LABELS}})
    try:
        core.patch_node_status(name, {"status": offered})
        yield name
    finally:
        gone = {GPU: None}
        core.patch_node_status(name, {"status": {"capacity": gone, "allocatable": gone}})
        core.patch_node(name, {"metadata": {"labels": dict.fromkeys(LABELS)}})


def planned(*arguments):
    told = CliRunner().invoke(
        cli.app, ["plan", "causal-lm", "--cluster", "--json", "--formula", *arguments]
    )
    assert told.exit_code in (0, 1), told.output
    return json.loads(told.stdout)


def test_plan_uses_what_the_nodes_offer(api):
    with gpus_on_a_node(api, 4) as name:
        found = planned("--gpus-per-node", "4")
        short = planned("--gpus-per-node", "8")
        memory = api.read_node(name).status.allocatable["memory"]
    assert found["works"]
    assert found["hardware"]["gpu"] == "A100-80"
    assert found["hardware"]["host_memory"] == int(memory.removesuffix("Ki")) * 1024
    assert "the nearest setting that works is compute.nproc_per_node=4" in short["problems"][0]
    assert GPU not in api.read_node(name).status.allocatable


def test_missing_permission_to_list_nodes_is_reported(monkeypatch, tmp_path):
    """A namespace's default account has no cluster-wide rights."""
    with own_namespace("plan") as namespace:
        token = kubectl("create", "token", "default", "-n", namespace).strip()
        settings = yaml.safe_load(kubectl("config", "view", "--minify", "--raw", "-o", "yaml"))
        settings["users"][0]["user"] = {"token": token}
        (tmp_path / "config").write_text(yaml.safe_dump(settings))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        told = CliRunner().invoke(cli.app, ["plan", "causal-lm", "--cluster", "--formula"])
        monkeypatch.undo()
    assert isinstance(told.exception, Refused)
    assert "cannot read nodes of the whole cluster" in told.exception.message
    assert "ClusterRole" in told.exception.remedy
