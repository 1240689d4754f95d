"""Training pods that no node can ever hold are found before anything waits for one."""

from __future__ import annotations

import pytest

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines.cluster.nodes import misfit_among

from support.kubernetes_server import node


def compute(*sets):
    return load("causal-lm", [f"compute.{item}" for item in sets]).compute


NODES = [node("", "24Gi", cpu="4"), node("8", "16Gi", cpu="64")]


@pytest.mark.parametrize(
    "pods",
    [
        "pods={cpu: 4, memory: 24Gi}",
        "pods={cpu: 64, memory: 16Gi, gpus: 8}",
        "pods={cpu: 500m, memory: 1000M}",
    ],
)
def test_pod_that_one_node_can_hold_fits(pods):
    assert misfit_among(compute(pods), NODES) is None


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        ("pods={memory: 200Gi}", "memory 200Gi, which none of the 2 nodes offers (at most cpu 64"),
        ("pods={cpu: 5, memory: 20Gi}", "cpu 5, memory 20Gi"),
        ("pods={gpus: 9, memory: 1Gi}", "nvidia.com/gpu 9"),
        ("pods={memory: 1Gi, node_selector: {zone: a}}", "nodes with zone=a"),
    ],
)
def test_pod_that_no_node_can_hold_is_refused(pods, words):
    found = misfit_among(compute(pods), NODES)
    assert found
    with pytest.raises(BadInput, match="none of the 2 nodes") as raised:
        found.raise_if_certain()
    assert words in raised.value.message


def test_cluster_that_may_add_nodes_only_warns():
    growing = node("", "8Gi")
    growing["metadata"]["labels"]["karpenter.sh/nodepool"] = "default"
    found = misfit_among(compute("pods={memory: 200Gi}"), [growing])
    assert found
    found.raise_if_certain()
    assert "waits unless the cluster adds a larger node" in str(found)
