"""The nodes that GPUs are in: how many, and how much host memory each has for offloading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """A node of a cluster, with GPUs of one kind.

    gpu: the kind, by its name in the table.
    memory: bytes of host memory.
    """

    gpu: str
    gpus: int
    memory: int


@dataclass(frozen=True)
class Hosts:
    """What is known about the nodes.

    nodes: all existing nodes; None means an unlimited number of any kind.
    memory: bytes of host memory per node, by kind of GPU; overrides the nodes' own values.
    """

    nodes: Sequence[Node] | None = None
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def of_a_cluster(self) -> bool:
        """Whether all existing nodes are known."""
        return self.nodes is not None

    def have(self, gpu: str, nodes: int, per_node: int) -> bool:
        """Return whether there are that many nodes with that many GPUs of a kind each."""
        return self.nodes is None or len(self.with_gpus(gpu, per_node)) >= nodes

    def with_gpus(self, gpu: str, per_node: int) -> list[Node]:
        """Return the nodes with that many GPUs of a kind each, the most memory first."""
        found = [node for node in self.nodes or () if node.gpu == gpu and node.gpus >= per_node]
        return sorted(found, key=lambda node: -node.memory)

    def memory_of(self, gpu: str, nodes: int, per_node: int) -> int | None:
        """Return the host memory in bytes that each of that many nodes has; None if unknown.

        Uses the nodes with the most memory, because pods that request it run there.
        """
        if gpu in self.memory:
            return self.memory[gpu]
        found = self.with_gpus(gpu, per_node)[:nodes]
        return found[-1].memory if found else None
