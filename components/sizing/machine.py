"""What a plan is made for: a model, GPUs, and the user's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel

from steadytrain.components.memory.setting import Precision
from steadytrain.components.memory.shape import Shape
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.strategies import strategy_spec
from steadytrain.components.sizing.hardware import Gpu
from steadytrain.components.sizing.length import Sampled


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
        nodes = [node for node in self.nodes or () if node.gpu == gpu and node.gpus >= per_node]
        return sorted(nodes, key=lambda node: -node.memory)

    def memory_of(self, gpu: str, nodes: int, per_node: int) -> int | None:
        """Return the host memory in bytes that each of that many nodes has; None if unknown.

        Uses the nodes with the most memory, because pods that request it run there.
        """
        if gpu in self.memory:
            return self.memory[gpu]
        result = self.with_gpus(gpu, per_node)[:nodes]
        return result[-1].memory if result else None


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, with one rank each.

    host_memory: bytes of host memory per node; None if unknown.
    """

    gpu: Gpu
    nodes: int = 1
    per_node: int = 1
    host_memory: int | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.per_node} x {self.gpu.name} ({self.gpu.memory_gb:g} GB each)"


@dataclass(frozen=True)
class Workload:
    """A configured model to train on a machine.

    name: of the model, as people know it.
    hosts: the available nodes, for this machine or another one.
    sampled: what a sample of the data says; None if they are prepared, or were not looked at.
    """

    config: RunConfig
    name: str
    shape: Shape
    machine: Machine
    hosts: Hosts = field(default_factory=Hosts)
    sampled: Sampled | None = None

    def on(self, gpu: Gpu, nodes: int, per_node: int) -> Workload:
        """Return the same job on other GPUs of these hosts."""
        memory = self.hosts.memory_of(gpu.name, nodes, per_node)
        return replace(self, machine=Machine(gpu, nodes, per_node, memory))

    @property
    def is_available(self) -> bool:
        """Whether the hosts have such a machine."""
        machine = self.machine
        return self.hosts.have(machine.gpu.name, machine.nodes, machine.per_node)

    def is_set(self, field: str) -> bool:
        """Return whether the user has set a field, such as "training.optim".

        None and "auto" count as not set.
        """
        holder: object = self.config
        for part in field.split("."):
            if not isinstance(holder, BaseModel) or part not in holder.model_fields_set:
                return False
            holder = getattr(holder, part)
        return holder not in (None, "auto")

    @property
    def from_scratch(self) -> bool:
        return self.config.model.base is None

    @property
    def precision(self) -> Precision:
        """The configured precision; if not set, 16 bits if the device can multiply in them."""
        training = self.config.training
        if training.bf16 or training.fp16:
            return "bf16" if training.bf16 else "fp16"
        if self.is_set("training.bf16") or self.is_set("training.fp16"):
            return "fp32"
        if self.machine.gpu.bf16:
            return "bf16"
        # Loss scaling needs CUDA.
        return "fp16" if self.machine.gpu.cuda else "fp32"

    @property
    def has_precision(self) -> bool:
        """Whether the device supports the precision; a CPU supports all, some via float32."""
        gpu = self.machine.gpu
        return self.precision != "bf16" or gpu.bf16 or not gpu.cuda

    def not_supported_by(self, strategy: str) -> str:
        """Return the precision or user setting that a strategy does not support; "" if none."""
        if self.precision == "fp16" and "training.fp16" in strategy_spec(strategy).unsupported:
            return "training.fp16"
        return self.config.not_supported_by(strategy)

    @property
    def short_of_memory(self) -> bool:
        """Whether the rule for small cards applies.

        It does for at most 8 GB, if sixteen bytes per parameter need more than that.
        """
        gpu = self.machine.gpu
        return gpu.cuda and gpu.memory_gb <= 8 and 16 * self.shape.parameters > gpu.memory

    @property
    def global_batch(self) -> int:
        """The user's value; on a small card with an open batch size, 16 sequences per rank."""
        training = self.config.training
        open_ = training.micro_batch is None and not self.is_set("training.global_batch_size")
        if self.short_of_memory and open_:
            return 16 * self.machine.ranks
        return training.global_batch_size
