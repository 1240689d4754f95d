"""A cluster's nodes: their GPUs, as the planner sees them, and whether a run's pods fit on one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.cluster import NODE, Cluster, Manifest, connect
from steadytrain.components.shared.config import ComputeConfig, RunConfig
from steadytrain.components.shared.config.compute import PodsConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import size
from steadytrain.components.sizing.hardware import Gpu, known_gpu
from steadytrain.components.sizing.machine import Hosts, Node

GPU: Final = "nvidia.com/gpu"
_SHARED: Final = "-SHARED"
"""Suffix of the product label on nodes where pods take turns on a GPU (time-slicing)."""


@dataclass(frozen=True)
class GpuNode:
    """A node that accepts pods with GPUs.

    product, gpu_memory: from the node's labels, the memory in MiB; "" and None if not labeled.
    gpus: number of whole GPUs.
    sharers: number of pods that may share one GPU. The node offers each GPU that many times.
    memory: bytes of the node's RAM that pods may use.
    """

    product: str
    gpu_memory: int | None
    gpus: int
    sharers: int
    memory: int

    def __str__(self) -> str:
        memory = size(self.gpu_memory * 2**20) if self.gpu_memory else "memory not labeled"
        return f"{self.product or 'unknown GPU'} ({memory})"


def gpu_nodes(nodes: Sequence[Manifest], resource: str = GPU) -> Iterator[GpuNode]:
    """Yield the nodes that are ready, accept pods, and have GPUs.

    Args:
        resource: resource name under which nodes offer GPUs.
    """
    from kubernetes.utils import parse_quantity

    for node in nodes:
        allocatable = node["status"].get("allocatable") or {}
        labels = node["metadata"].get("labels") or {}
        # The label is 0 if nothing but the number of the node's GPUs is known.
        sharers = int(labels.get("nvidia.com/gpu.replicas", 1)) or 1
        gpus = int(allocatable.get(resource, 0)) // sharers
        if gpus and _takes_pods(node):
            memory = labels.get("nvidia.com/gpu.memory")
            yield GpuNode(
                product=labels.get("nvidia.com/gpu.product", "").removesuffix(_SHARED),
                gpu_memory=int(memory) if memory else None,
                gpus=gpus,
                sharers=sharers,
                memory=int(parse_quantity(allocatable["memory"])),
            )


def _takes_pods(node: Manifest) -> bool:
    conditions = node["status"].get("conditions") or ()
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
    return ready and not node["spec"].get("unschedulable")


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


_GROWING: Final = (
    "karpenter.sh/",
    "eks.amazonaws.com/nodegroup",
    "cloud.google.com/gke-nodepool",
    "kubernetes.azure.com/agentpool",
)
"""Labels of nodes in a group that may get more and other nodes, from AWS, Google or Azure."""
_REMEDY: Final = "lower compute.pods, or add a node that is large enough"


@dataclass(frozen=True)
class Misfit:
    """Why a training pod fits on no node.

    certain: whether the cluster has no node groups that may add a larger node.
    """

    reason: str
    certain: bool
    remedy: str = _REMEDY

    def raise_if_certain(self) -> None:
        """Raise BadInput if no node will ever hold the pod."""
        if self.certain:
            raise BadInput(self.reason, remedy=self.remedy)

    def __str__(self) -> str:
        return f"{self.reason}; the run waits unless the cluster adds a larger node"


def misfit(compute: ComputeConfig, cluster: Cluster) -> Misfit | None:
    """Check whether a training pod fits on any node, by what each one offers to pods.

    Returns:
        None if it fits, or if training runs in the train step's own pod.

    Raises:
        Unreachable: the API server does not answer.
        Refused: the connection may not list nodes.
    """
    if compute.launcher == "process":
        return None
    return misfit_among(compute, cluster.list(NODE))


def misfit_among(compute: ComputeConfig, nodes: Sequence[Manifest]) -> Misfit | None:
    """Return why a training pod fits on no node of a list; None if it does on one."""
    from kubernetes.utils import parse_quantity

    pods = compute.pods
    wanted = {"cpu": pods.cpu, "memory": pods.memory}
    if compute.gpus_of_a_node:
        wanted[pods.gpu_resource] = str(compute.gpus_of_a_node)
    labels = pods.node_selector | pods.spot.node_selector
    chosen = [node for node in nodes if labels.items() <= _labels(node).items()]
    for node in chosen:
        offered = node["status"].get("allocatable") or {}
        if all(
            parse_quantity(offered.get(name, "0")) >= parse_quantity(size)
            for name, size in wanted.items()
        ):
            return None
    growing = any(name.startswith(_GROWING) for node in nodes for name in _labels(node))
    size = ", ".join(f"{name} {amount}" for name, amount in wanted.items())
    among = f" with {', '.join(f'{k}={v}' for k, v in labels.items())}" if labels else ""
    reason = f"compute.pods asks for {size}, which none of the {len(nodes)} nodes{among} offers"
    return Misfit(f"{reason}{_largest(chosen, list(wanted))}", certain=not growing)


def _largest(nodes: Sequence[Manifest], names: Sequence[str]) -> str:
    """Return the most that any node offers of each resource, in words."""
    from kubernetes.utils import parse_quantity

    offers = [node["status"].get("allocatable") or {} for node in nodes]
    most = [
        f"{name} {max((item.get(name, '0') for item in offers), key=parse_quantity)}"
        for name in names
        if offers
    ]
    return f" (at most {', '.join(most)})" if most else ""


def _labels(node: Manifest) -> dict[str, str]:
    return node["metadata"].get("labels") or {}
