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
from steadytrain.components.sizing.hardware import Gpu, find_gpu
from steadytrain.components.sizing.machine import Hosts, Node

GPU: Final = "nvidia.com/gpu"
_MIG: Final = "nvidia.com/mig-"
"""Prefix of resources and labels of MIG devices, under NVIDIA's `mixed` strategy."""
_SHARED: Final = "-SHARED"
"""Suffix of the product label on nodes where pods take turns on a GPU (time-slicing)."""


@dataclass(frozen=True)
class GpuNode:
    """A node that accepts pods with GPUs, or with MIG devices of one profile.

    resource: the name under which it offers them.
    product, gpu_memory: from the node's labels, the memory in MiB; "" and None if not labeled.
    gpus: number of whole GPUs or MIG devices.
    sharers: number of pods that may share one GPU. The node offers each GPU that many times.
    memory: bytes of the node's RAM that pods may use.
    """

    resource: str
    product: str
    gpu_memory: int | None
    gpus: int
    sharers: int
    memory: int

    def __str__(self) -> str:
        memory = size(self.gpu_memory * 2**20) if self.gpu_memory else "memory not labeled"
        return f"{self.product or 'unknown GPU'} ({memory})"


def gpu_nodes(nodes: Sequence[Manifest], resource: str = "") -> Iterator[GpuNode]:
    """Yield the nodes that are ready, accept pods, and have GPUs; twice those with two kinds.

    Args:
        resource: resource name under which nodes offer GPUs; "" means NVIDIA's for GPUs and for
            MIG devices.
    """
    from kubernetes.utils import parse_quantity

    for node in nodes:
        allocatable = node["status"].get("allocatable") or {}
        own = [name for name in sorted(allocatable) if name == GPU or name.startswith(_MIG)]
        for name in ([resource] if resource else own) if _takes_pods(node) else ():
            labels = _labels(node)
            named = name if name.startswith(_MIG) else GPU
            # The label is 0 if nothing but the number of the node's GPUs is known.
            sharers = int(labels.get(f"{named}.replicas", 1)) or 1
            gpus = int(allocatable.get(name, 0)) // sharers
            if not gpus:
                continue
            memory = labels.get(f"{named}.memory")
            yield GpuNode(
                resource=name,
                product=_product(labels, named),
                gpu_memory=int(memory) if memory else None,
                gpus=gpus,
                sharers=sharers,
                memory=int(parse_quantity(allocatable["memory"])),
            )


def _product(labels: Mapping[str, str], named: str) -> str:
    """Return the name of GPUs or MIG devices, as GPU feature discovery labels them.

    Args:
        named: prefix of the labels. Those of MIG devices need not name the GPU.
    """
    product = labels.get(f"{named}.product", "")
    if not product and named != GPU and (whole := labels.get(f"{GPU}.product")):
        product = f"{whole}-MIG-{named.removeprefix(_MIG)}"
    return product.removesuffix(_SHARED)


def mig_unready(node: Manifest) -> str:
    """Return how far NVIDIA's MIG manager has come in dividing a node's GPUs; "" if it is done."""
    labels = _labels(node)
    state = labels.get("nvidia.com/mig.config.state", "success")
    config = labels.get("nvidia.com/mig.config", "all-disabled")
    return "" if state == "success" else f"nvidia.com/mig.config {config} in state {state}"


def _takes_pods(node: Manifest) -> bool:
    conditions = node["status"].get("conditions") or ()
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
    return ready and not node["spec"].get("unschedulable")


def cluster_hosts(config: RunConfig, table: Sequence[Gpu]) -> tuple[list[Gpu], Hosts, list[str]]:
    """Return the kinds that a run's pods can get, the nodes by kind, and remarks about them.

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
    resource = pods.gpu_resource if "gpu_resource" in pods.model_fields_set else ""
    result = list(gpu_nodes(_with_labels(nodes, selector), resource))
    if not result:
        raise _without_gpus(len(nodes), pods.gpu_resource, selector)
    kinds, hosts, unknown = dict[str, Gpu](), list[Node](), list[GpuNode]()
    for node in result:
        kind = _kind(node, table)
        # Pods ask for one resource: of two names for a kind, the first counts.
        if kind is None or kinds.setdefault(kind.name, kind).resource != kind.resource:
            unknown.append(node)
        else:
            hosts.append(Node(kind.name, node.gpus, _memory(node, pods)))
    if not kinds:
        raise BadInput(
            f"--cluster: none of its GPUs is in the plan's table: {_described(result)}",
            remedy="leave --cluster out and name a similar one: --gpu "
            + ", ".join(gpu.name for gpu in table),
        )
    there = sorted(kinds.values(), key=lambda gpu: gpu.memory_gb)
    return there, Hosts(hosts), list(_remarks(result, unknown))


def _kind(node: GpuNode, table: Sequence[Gpu]) -> Gpu | None:
    """Return the kind of a node's GPUs or MIG devices; None if the table has none of the name."""
    try:
        return find_gpu(node.product, table).model_copy(update={"offered_as": node.resource})
    except BadInput:
        return None


def _memory(node: GpuNode, pods: PodsConfig) -> int:
    """Return the bytes of RAM that a pod can get on a node: at most compute.pods.memory, if set."""
    from kubernetes.utils import parse_quantity

    given = "memory" in pods.model_fields_set
    return min(node.memory, int(parse_quantity(pods.memory))) if given else node.memory


def _with_labels(nodes: Sequence[Manifest], labels: Mapping[str, str]) -> list[Manifest]:
    return [node for node in nodes if labels.items() <= _labels(node).items()]


def _without_gpus(nodes: int, resource: str, selector: Mapping[str, str]) -> BadInput:
    among = f" with {', '.join(f'{k}={v}' for k, v in selector.items())}" if selector else ""
    return BadInput(
        f"--cluster: none of the nodes{among} is ready, accepts pods and offers {resource} "
        f"({nodes} checked)",
        remedy="see `kubectl describe nodes`: GPUs are offered by NVIDIA's device plugin; "
        "compute.pods.gpu_resource and compute.pods.node_selector select them. Without "
        "--cluster, plan for a GPU that you name: --gpu h100",
    )


def _remarks(nodes: Sequence[GpuNode], unknown: Sequence[GpuNode]) -> Iterator[str]:
    if unknown:
        yield (
            f"the cluster's {_described(unknown)}: not in the plan's table, or offered by a second "
            "name, and left out"
        )
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
