"""The nodes' own memory for offloading and their number, and what a plan says about them."""

from __future__ import annotations

import json
import re

import pytest

from steadytrain.components.plan.render import filled, render
from steadytrain.components.sizing.fit import choose
from steadytrain.components.sizing.hardware import all_gpus
from steadytrain.components.sizing.machine import Hosts, Node
from steadytrain.components.sizing.strategy import options

GB = 10**9
LARGE = "hub:meta-llama/Llama-3.1-70B"
SMALL = "hub:Qwen/Qwen2.5-0.5B"


def hosts_with(memory, gpu="H100"):
    return Hosts(memory={gpu: memory})


def cluster(*nodes):
    return Hosts([Node(*node) for node in nodes])


def whole(make_plan, hosts, nodes=1, **fields):
    fields = {"model__base": LARGE, "model__adapter__kind": "none", **fields}
    return make_plan("h100", 8, nodes, hosts=hosts, **fields)


def test_offloaded_memory_is_compared_with_node_memory(make_plan):
    need = whole(make_plan, None).choice.memory.host * 8
    assert need > 0
    assert whole(make_plan, hosts_with(int(need / 0.9) + 1)).works
    short = whole(make_plan, hosts_with(int(need / 0.9) - 10))
    assert not short.works
    (problem,) = short.problems
    assert f"a node needs {need / GB:.1f} GB of host memory" in problem
    assert f"{need / GB:.1f} of its {need / 0.9 / GB:.1f} GB are usable" in problem


def test_unknown_host_memory_is_reported_and_does_not_block_the_plan(make_plan):
    plan = whole(make_plan, None)
    assert plan.works
    assert re.search(r"on the host +\d+\.\d\d\n", render(plan))
    assert plan.as_data()["hardware"]["host_memory"] is None


def test_known_host_memory_is_also_reported_per_node(make_plan):
    plan = whole(make_plan, hosts_with(2000 * GB))
    told = f"a node {plan.choice.memory.host * 8 / GB:.1f} of 2000.0"
    assert told in render(plan)


def test_option_that_exceeds_host_memory_is_skipped(make_plan):
    """Full training would need that memory. Training with adapters does not."""
    fields = {"model__base": LARGE}
    free = make_plan("h100", 8, **fields)
    assert free.choice.option.offload != "none"
    tight = make_plan("h100", 8, hosts=hosts_with(100 * GB), **fields)
    assert tight.works
    assert (tight.choice.option.adapter, tight.choice.option.offload) == ("lora", "none")
    assert tight.choice == choose(tight.job, options(tight.job))


def test_more_nodes_are_suggested_if_each_then_needs_less(make_plan):
    need = whole(make_plan, None).choice.memory.host * 8
    short = whole(make_plan, hosts_with(need // 2))
    remedies = "\n".join(short.remedies)
    found = re.search(r"--nodes (\d+) fits", remedies)
    assert found, remedies
    assert whole(make_plan, hosts_with(need // 2), int(found[1])).works


def test_remedies_stay_within_host_memory(make_plan):
    base = "hub:meta-llama/Llama-3.1-8B"
    free = "\n".join(make_plan("rtx4050", model__base=base).remedies)
    assert "compute.offload=all" in free
    laptop = make_plan("rtx4050", hosts=hosts_with(8 * GB, "RTX4050"), model__base=base)
    assert "offload" not in "\n".join(laptop.remedies)


def test_hosts_differ_by_gpu(make_plan):
    """This machine's memory says nothing about machines with H100s."""
    hosts = hosts_with(GB, "RTX4050")
    plan = make_plan("rtx4050", 8, hosts=hosts, table=all_gpus(), model__base=LARGE)
    assert not plan.works
    assert "H100" in [offer.gpu for offer in plan.cheapest]


def test_only_nodes_with_enough_gpus_count(make_plan):
    hosts = cluster(("H100", 8, 999 * GB), ("H100", 8, 500 * GB), ("H100", 4, 4000 * GB))
    assert hosts.memory_of("H100", 1, 8) == 999 * GB
    assert hosts.memory_of("H100", 2, 8) == 500 * GB
    assert hosts.memory_of("H100", 2, 4) == 999 * GB
    assert not hosts.have("H100", 3, 8)
    assert hosts.have("H100", 3, 4)
    assert not hosts.have("T4", 1, 1)


@pytest.mark.parametrize(
    ("nodes", "per_node", "there", "told", "nearest"),
    [
        (4, 8, [("H100", 8)] * 2, "compute.nodes = 4: the cluster has 2", "compute.nodes=2"),
        (
            1,
            16,
            [("H100", 8)] * 2,
            "compute.nproc_per_node = 16: the cluster's nodes have at most 8",
            "compute.nproc_per_node=8",
        ),
        (
            4,
            8,
            [("H100", 8)] + [("H100", 4)] * 4,
            "compute.nodes = 4: the cluster has 1",
            "compute.nproc_per_node=4",
        ),
        (
            4,
            8,
            [("H100", 4)] * 2 + [("T4", 8)] * 8,
            "compute.nproc_per_node = 8: the cluster's nodes have at most 4",
            "compute.nodes=2, compute.nproc_per_node=4",
        ),
        # A global batch of 32 can't be divided among 3 nodes.
        (4, 1, [("H100", 1)] * 3, "compute.nodes = 4: the cluster has 3", "compute.nodes=2"),
    ],
)
def test_requesting_more_than_the_cluster_has_names_the_nearest_fit(
    make_plan, nodes, per_node, there, told, nearest
):
    hosts = cluster(*((*node, 900 * GB) for node in there))
    plan = make_plan("h100", per_node, nodes, hosts=hosts, model__base=SMALL)
    assert not plan.works
    (problem,) = plan.problems
    assert told in problem
    assert f"; the nearest setting that works is {nearest}" in problem
    assert "do not fit, or are too few: " in render(plan)
    sizes = {"nodes": nodes, "nproc_per_node": per_node}
    for setting in nearest.split(", "):
        name, _, value = setting.removeprefix("compute.").partition("=")
        sizes[name] = int(value)
    fewer = make_plan(
        "h100", sizes["nproc_per_node"], sizes["nodes"], hosts=hosts, model__base=SMALL
    )
    assert fewer.works


def test_plan_says_if_no_smaller_number_works(make_plan):
    hosts = cluster(("H100", 1, 100 * GB))
    plan = whole(make_plan, hosts, 2)
    assert "no smaller number works" in plan.problems[0]


def test_remedies_use_only_gpus_of_the_cluster(make_plan):
    hosts = cluster(("RTX4090", 2, 900 * GB), ("A100-40", 1, 900 * GB))
    fields = {"model__adapter__kind": "none", "compute__strategy": "auto"}
    plan = make_plan("rtx4090", hosts=hosts, **fields)
    told = re.findall(r"--gpu\S* \S+", "\n".join(plan.remedies))
    assert "--gpu h100" not in told
    for option in told:
        name, _, value = option.partition(" ")
        gpu = value if name == "--gpu" else "rtx4090"
        per_node = int(value) if name == "--gpus-per-node" else 1
        assert make_plan(gpu, per_node, hosts=hosts, **fields).works, option


def test_pods_request_the_memory_that_offloading_takes(make_plan):
    plan = whole(make_plan, cluster(("H100", 8, 2000 * GB)))
    assert plan.works
    chosen = {decision.field: decision.value for decision in plan.decisions}
    asked = int(chosen["compute.pods.memory"].removesuffix("Gi")) * 2**30
    assert plan.choice.host_needed < 0.9 * asked < 1.01 * plan.choice.host_needed
    assert filled(plan).compute.pods.memory == chosen["compute.pods.memory"]
    assert json.dumps(plan.as_data())
    elsewhere = whole(make_plan, hosts_with(2000 * GB))
    assert "compute.pods.memory" not in [decision.field for decision in elsewhere.decisions]


def test_pod_memory_is_unchanged_without_offloading(make_plan):
    plan = make_plan("h100", 1, hosts=cluster(("H100", 8, 2000 * GB)), model__base=SMALL)
    assert "compute.pods.memory" not in [decision.field for decision in plan.decisions]
