"""The nodes that GPUs are in: how many there are, and the memory that each has for offloading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """Of a cluster, with GPUs of one kind.

    gpu: the kind, by its name in the table. memory: bytes of the node's own.
    """

    gpu: str
    gpus: int
    memory: int


@dataclass(frozen=True)
class Hosts:
    """What is known of nodes.

    nodes: all that there are; None: as many of any kind as one likes.
    memory: bytes of a node with GPUs of a kind, by its name; goes over what the nodes have.
    """

    nodes: Sequence[Node] | None = None
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def of_a_cluster(self) -> bool:
        """Whether all that there are is known."""
        return self.nodes is not None

    def have(self, gpu: str, nodes: int, per_node: int) -> bool:
        """Whether there are so many nodes with so many GPUs of a kind each."""
        return self.nodes is None or len(self.with_gpus(gpu, per_node)) >= nodes

    def with_gpus(self, gpu: str, per_node: int) -> list[Node]:
        """Nodes with so many GPUs of a kind each, the most memory first."""
        found = [node for node in self.nodes or () if node.gpu == gpu and node.gpus >= per_node]
        return sorted(found, key=lambda node: -node.memory)

    def memory_of(self, gpu: str, nodes: int, per_node: int) -> int | None:
        """Bytes that so many nodes have each; of those with the most, as pods ask for them."""
        if gpu in self.memory:
            return self.memory[gpu]
        found = self.with_gpus(gpu, per_node)[:nodes]
        return found[-1].memory if found else None
