"""What a plan is made for: a model, GPUs, and what the user has said."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pydantic import BaseModel

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.train.plan.hardware import Gpu
from steadytrain.components.train.plan.hosts import Hosts
from steadytrain.components.train.plan.setting import Precision
from steadytrain.components.train.plan.shape import Shape


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, a rank each.

    host_memory: bytes of each node's own; None: not known.
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
class Job:
    """A model to train on a machine, by a configuration.

    name: of the model, as people know it.
    hosts: that there are, for this machine or another one.
    """

    config: RunConfig
    name: str
    shape: Shape
    machine: Machine
    hosts: Hosts = field(default_factory=Hosts)

    def on(self, gpu: Gpu, nodes: int, per_node: int) -> Job:
        """The same on other GPUs of these hosts."""
        memory = self.hosts.memory_of(gpu.name, nodes, per_node)
        return replace(self, machine=Machine(gpu, nodes, per_node, memory))

    @property
    def is_available(self) -> bool:
        """Whether the hosts have such a machine."""
        machine = self.machine
        return self.hosts.have(machine.gpu.name, machine.nodes, machine.per_node)

    def given(self, field: str) -> bool:
        """Whether the user has set a field, such as "training.optim".

        None and "auto" leave it open.
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
        """As configured, or where that is left open 16 bits on a GPU."""
        training = self.config.training
        if training.bf16 or training.fp16:
            return "bf16" if training.bf16 else "fp16"
        if self.given("training.bf16") or self.given("training.fp16"):
            return "fp32"
        if not self.machine.gpu.cuda:
            return "fp32"
        return "bf16" if self.machine.gpu.bf16 else "fp16"

    @property
    def unsharded(self) -> bool:
        """Whether the precision, or what the user has set, goes with no shards."""
        return self.precision == "fp16" or bool(self.config.unsharded)

    @property
    def short_of_memory(self) -> bool:
        """Whether the rule for small cards holds: 8 GB at most, and sixteen bytes a parameter
        are more than that.
        """
        gpu = self.machine.gpu
        return gpu.cuda and gpu.memory_gb <= 8 and 16 * self.shape.parameters > gpu.memory

    @property
    def global_batch(self) -> int:
        """The user's; on a small card, where the batch is left open, 16 sequences a rank."""
        training = self.config.training
        open_ = training.micro_batch_size is None and not self.given("training.global_batch_size")
        if self.short_of_memory and open_:
            return 16 * self.machine.ranks
        return training.global_batch_size
