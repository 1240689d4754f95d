"""Where a model is trained: on this machine, or in pods of a cluster."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from steadytrain.components.shared.config.base import Seconds, Section, at_odds


def _as_text(value: object) -> object:
    """YAML reads 4 as a number."""
    return str(value) if isinstance(value, int | float) else value


Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"),
]
"""An amount in the notation of Kubernetes: 500m, 4, 16Gi."""

Strategy = Literal["auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3"]
Offload = Literal["none", "optimizer", "all"]
SHARDING: Final = ("fsdp", "zero1", "zero2", "zero3")
"""Strategies with which no rank has all of the state."""
OFFLOADING: Final = {"optimizer": ("zero1", "zero2", "zero3"), "all": ("fsdp", "zero3")}
"""Which strategies can: FSDP moves weights, gradients and optimizer together or not at all."""
_WITHIN_LAYERS = {"tensor_parallel", "pipeline_parallel", "model_parallel", "tp", "pp"}

Cores = Annotated[str, BeforeValidator(_as_text), Field(pattern=r"^[0-9]+(\.[0-9]+)?m?$")]
"""Of a processor: 500m, 4."""


class VolumeConfig(Section):
    """A persistent volume claim that is mounted."""

    claim: str = Field(..., min_length=1, description="its name, in the run's namespace")
    path: str = Field(..., pattern=r"^/.+", description="where it is mounted")


class SpotConfig(Section):
    """What leads to nodes that cost less and may be taken away; added to what pods have anyway."""

    node_selector: dict[str, str] = Field(default={}, description="labels that a node must have")
    tolerations: list[dict[str, Any]] = Field(
        default=[], description="of taints, as in a pod's specification"
    )


class PodsConfig(Section):
    """The pods that train on a cluster, one a node; none of this decides what is learned."""

    image: str | None = Field(None, description="none: that of the train step's own pod")
    cpu: Cores = Field(
        "4", description="cores that each pod requests; it may take more where a node has them"
    )
    memory: Quantity = Field("16Gi", description="of each pod: requested, and its limit")
    gpus: int | None = Field(
        None, ge=0, description="of each pod; none: one a rank with compute.device cuda, else 0"
    )
    gpu_resource: str = Field("nvidia.com/gpu", description="name under which nodes offer GPUs")
    shared_memory: Quantity = Field("2Gi", description="size of /dev/shm, which counts as memory")
    temporary_storage: Quantity = Field(
        "50Gi",
        description="the most that each pod may write to /tmp and its logs; models from a hub are "
        "downloaded there",
    )
    service_account: str | None = Field(
        None, description="of the pods, which need no rights; none: the namespace's default"
    )
    node_selector: dict[str, str] = Field(default={}, description="labels that a node must have")
    tolerations: list[dict[str, Any]] = Field(
        default=[], description="of taints, as in a pod's specification"
    )
    affinity: dict[str, Any] = Field(default={}, description="as in a pod's specification")
    spot: SpotConfig = SpotConfig()
    priority_class: str | None = Field(None, description="which pods may make room for these")
    labels: dict[str, str] = Field(
        default={}, description="of each job, such as kueue.x-k8s.io/queue-name"
    )
    volumes: list[VolumeConfig] | None = Field(
        None, description="none: those that the train step's own pod has"
    )
    pending_timeout_seconds: Seconds = Field(
        1800, gt=0, description="how long a pod may wait for a node, a quota or its image"
    )

    @property
    def cores(self) -> float:
        """What `cpu` asks for."""
        thousandths = self.cpu.endswith("m")
        return float(self.cpu.removesuffix("m")) / (1000 if thousandths else 1)


class ComputeConfig(Section):
    """Where it is trained."""

    launcher: Literal["auto", "process", "trainjob", "pytorchjob"] = Field(
        "auto",
        description="process: on this machine; trainjob, pytorchjob: in pods, by Kubeflow Trainer "
        "v2 or by the training operator before it; auto: in pods where it runs as a step of a "
        "pipeline on a cluster that has one of them",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nodes: int = Field(1, ge=1, description="machines, a pod each on a cluster")
    nproc_per_node: int = Field(1, ge=1, description="ranks of each node")
    threads_per_rank: int | None = Field(
        None, ge=1, description="none: cores over ranks; in a pod, of the cores that it requests"
    )
    strategy: Strategy = Field(
        "auto",
        description="how the ranks share the work and the memory: ddp: each has the whole model; "
        "zero1, zero2, zero3 (DeepSpeed): they share the optimizer's state, the gradients too, "
        "the weights too; fsdp (PyTorch): all three; auto: single on one rank, else ddp",
    )
    offload: Offload = Field(
        "none",
        description="what is kept in the host's memory instead of the GPU's: the optimizer's "
        "state, or the weights too; with a strategy that shards them",
    )
    pods: PodsConfig = PodsConfig()
    price_per_hour: float | None = Field(
        None,
        ge=0,
        description="of all that trains together, in USD; decides nothing, and a run that is "
        "continued may have another; none: the cost is not known",
    )

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nodes * self.nproc_per_node

    @property
    def gpus_of_a_node(self) -> int:
        """That each pod asks for."""
        if self.pods.gpus is not None:
            return self.pods.gpus
        return self.nproc_per_node if self.device == "cuda" else 0

    @field_validator("strategy", mode="before")
    @classmethod
    def _none_cuts_layers(cls, value: object) -> object:
        if isinstance(value, str) and value in _WITHIN_LAYERS:
            raise at_odds(
                "compute.strategy",
                value,
                "this product cuts no layer and no chain of layers into parts for several GPUs",
                "take fsdp or zero3, which spread the weights over the ranks and suffice to about "
                "100 billion parameters; beyond it takes tensor and pipeline parallelism, as in "
                "Megatron-LM, and a fast connection within each node",
            )
        return value

    @model_validator(mode="after")
    def _single_is_one_rank(self) -> ComputeConfig:
        if self.strategy == "single" and self.world_size > 1:
            raise at_odds(
                "compute.strategy",
                self.strategy,
                f"it has one rank, and compute asks for {self.world_size}",
                "take ddp, or one that shards, or set nodes and nproc_per_node to 1",
            )
        return self

    @model_validator(mode="after")
    def _only_what_is_sharded_is_offloaded(self) -> ComputeConfig:
        if self.offload != "none" and self.strategy not in OFFLOADING[self.offload]:
            raise at_odds(
                "compute.offload",
                self.offload,
                f"compute.strategy {self.strategy} cannot do that",
                f"one of these can: {', '.join(OFFLOADING[self.offload])}",
            )
        return self

    @model_validator(mode="after")
    def _one_machine_is_one_node(self) -> ComputeConfig:
        if self.launcher == "process" and self.nodes > 1:
            raise at_odds(
                "compute.nodes",
                self.nodes,
                "compute.launcher process trains on this machine, which is one node",
                "set compute.nproc_per_node instead, or another compute.launcher",
            )
        return self
