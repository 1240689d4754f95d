"""A cluster's nodes with GPUs, in the form that the planner uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from steadytrain.components.shared.cluster import NODE, Manifest, connect
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.compute import PodsConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.hardware import Gpu, known_gpu
from steadytrain.components.sizing.hosts import Hosts, Node
from steadytrain.pipelines.cluster.gpus import GpuNode, gpu_nodes


def cluster_hosts(config: RunConfig, table: Sequence[Gpu]) -> tuple[Hosts, list[str]]:
    """Return the nodes that a run's pods can go to, by GPU kind, and remarks about them.

    Args:
        table: the GPU kinds that the planner knows. Nodes with other GPUs are left out.

    Raises:
        Unreachable: there is no cluster, or it does not answer.
        Refused: the connection may not list nodes.
        BadInput: no node has a GPU that is in the table.
    """
    pods = config.compute.pods
    selector = pods.node_selector | pods.spot.node_selector
    nodes = connect().list(NODE)
    found = list(gpu_nodes(_with_labels(nodes, selector), pods.gpu_resource))
    if not found:
        raise _without_gpus(len(nodes), pods.gpu_resource, selector)
    known = {node.product: kind for node in found if (kind := known_gpu(node.product, table))}
    if not known:
        raise BadInput(
            f"--cluster: none of its GPUs is in the plan's table: {_described(found)}",
            remedy="leave --cluster out and name a similar one: --gpu "
            + ", ".join(gpu.name for gpu in table),
        )
    hosts = [
        Node(known[node.product].name, node.gpus, _memory(node, pods))
        for node in found
        if node.product in known
    ]
    return Hosts(hosts), list(_remarks(found, known))


def _memory(node: GpuNode, pods: PodsConfig) -> int:
    """Return the bytes of RAM that a pod can get on a node: at most compute.pods.memory, if set."""
    from kubernetes.utils import parse_quantity

    given = "memory" in pods.model_fields_set
    return min(node.memory, int(parse_quantity(pods.memory))) if given else node.memory


def _with_labels(nodes: Sequence[Manifest], labels: Mapping[str, str]) -> list[Manifest]:
    return [
        node for node in nodes if labels.items() <= (node["metadata"].get("labels") or {}).items()
    ]


def _without_gpus(nodes: int, resource: str, selector: Mapping[str, str]) -> BadInput:
    among = f" with {', '.join(f'{k}={v}' for k, v in selector.items())}" if selector else ""
    return BadInput(
        f"--cluster: none of the nodes{among} is ready, accepts pods and offers {resource} "
        f"({nodes} checked)",
        remedy="see `kubectl describe nodes`: GPUs are offered by NVIDIA's device plugin; "
        "compute.pods.gpu_resource and compute.pods.node_selector select them. Without "
        "--cluster, plan for a GPU that you name: --gpu h100",
    )


def _remarks(nodes: Sequence[GpuNode], known: Mapping[str, Gpu]) -> Iterator[str]:
    unknown = [node for node in nodes if node.product not in known]
    if unknown:
        yield f"the cluster's {_described(unknown)}: not in the plan's table, and left out"
    shared = [node for node in nodes if node.sharers > 1]
    if shared:
        yield (
            f"the cluster's {_described(shared)}: shared by up to {max(n.sharers for n in shared)} "
            "pods; the plan counts whole GPUs, which no other pod may use"
        )


def _described(nodes: Sequence[GpuNode]) -> str:
    return ", ".join(dict.fromkeys(map(str, nodes)))
