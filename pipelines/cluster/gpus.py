"""GPUs of a cluster's nodes, from the device plugin and the labels of GPU feature discovery."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.cluster import Manifest
from steadytrain.components.shared.quantities import size

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
