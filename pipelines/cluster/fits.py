"""Whether a run's training pods fit on any node, however empty it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.cluster import NODE, Cluster, Manifest
from steadytrain.components.shared.config import ComputeConfig
from steadytrain.components.shared.errors import BadInput

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
