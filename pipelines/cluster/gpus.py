"""GPUs of a cluster's nodes, as the device plugin offers and GPU feature discovery labels them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.cluster import Manifest

GPU: Final = "nvidia.com/gpu"
_SHARED: Final = "-SHARED"
"""At the end of a product's name where pods take turns on a GPU (time-slicing)."""


@dataclass(frozen=True)
class GpuNode:
    """A node that pods with GPUs can go to.

    product, gpu_memory: as labelled, the latter in MiB; "" and None where they are not.
    gpus: whole ones.
    sharers: pods that may have the same one; a node offers it once for each.
    memory: bytes of the node's own that pods may have.
    """

    product: str
    gpu_memory: int | None
    gpus: int
    sharers: int
    memory: int

    def __str__(self) -> str:
        memory = f"{self.gpu_memory / 1024:.0f} GiB" if self.gpu_memory else "memory not labelled"
        return f"{self.product or 'GPU of unknown make'} ({memory})"


def gpu_nodes(nodes: Sequence[Manifest], resource: str = GPU) -> Iterator[GpuNode]:
    """Of a cluster's nodes those that are ready, take pods, and have GPUs.

    Args:
        resource: name under which they offer them.
    """
    from kubernetes.utils import parse_quantity

    for node in nodes:
        allocatable = node["status"].get("allocatable") or {}
        labels = node["metadata"].get("labels") or {}
        # It is 0 where nothing is known of the node's GPUs but their number.
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
