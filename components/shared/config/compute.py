"""Where a model is trained: on this machine, or in pods on a cluster."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from steadytrain.components.shared.config.strategies import (
    AUTO,
    DISK,
    Offload,
    check_strategy,
    strategies_that_offload,
    strategy_spec,
)
from steadytrain.components.shared.effects import Effect, IfSet, Seconds, Section, Use, at_odds
from steadytrain.components.shared.nccl import unknown_variable


def _as_text(value: object) -> object:
    """Convert numbers to text, because YAML reads 4 as a number."""
    return str(value) if isinstance(value, int | float) else value


Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"),
]
"""A quantity in Kubernetes notation: 500m, 4, 16Gi."""

_SET_FOR_PODS: Final = frozenset(
    {
        *("HOME", "TRACEPARENT", "OMP_NUM_THREADS"),
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
    }
)
_PREFIXES_SET_FOR_PODS: Final = (
    *("PET_", "TORCHELASTIC_", "STEADYTRAIN_"),
    *("KFP_", "ARGO_", "KUBERNETES_"),
)
"""Variables that steadytrain, the training operator or Kubernetes set in the pods."""
_WITHIN_LAYERS = {"tensor_parallel", "pipeline_parallel", "model_parallel", "tp", "pp"}

Launcher = Literal["auto", "process", "trainjob", "pytorchjob"]
Cores = Annotated[str, BeforeValidator(_as_text), Field(pattern=r"^[0-9]+(\.[0-9]+)?m?$")]
"""CPU cores: 500m, 4."""


class VolumeConfig(Section):
    """A persistent volume claim to mount."""

    claim: str = Field(..., min_length=1, description="Name of the claim, in the run's namespace.")
    path: str = Field(..., pattern=r"^/.+", description="Absolute path where it is mounted.")


class SecretKey(Section):
    """A key of a Secret in the run's namespace."""

    name: str = Field(..., min_length=1, description="Name of the Secret.")
    key: str = Field(..., min_length=1, description="Key of the Secret.")


class ValueFrom(Section):
    """Where a variable's value comes from, as in a pod spec."""

    secretKeyRef: SecretKey = Field(  # noqa: N815  as Kubernetes writes it
        ..., description="The key of the Secret that holds the value."
    )


class PodVariable(Section):
    """An environment variable of a pod, as in a pod spec: a value, or a key of a Secret."""

    name: str = Field(
        ...,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Name of the variable, such as NCCL_SOCKET_IFNAME.",
    )
    value: Annotated[str, BeforeValidator(_as_text)] | None = Field(
        None, description="The value. It must not be a secret: configurations are stored."
    )
    valueFrom: ValueFrom | None = Field(  # noqa: N815  as Kubernetes writes it
        None, description="The key of a Secret that holds the value, instead of `value`."
    )

    @field_validator("name")
    @classmethod
    def _is_nobody_elses(cls, name: str) -> str:
        if name in _SET_FOR_PODS or name.startswith(_PREFIXES_SET_FOR_PODS):
            raise ValueError("is set by steadytrain or by the cluster: leave it out")
        return name

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.value is None) == (self.valueFrom is None):
            raise ValueError("needs either value or valueFrom")
        return self

    def manifest(self) -> dict[str, Any]:
        """Return the entry of a container's `env`."""
        return self.model_dump(exclude_none=True)


class SpotConfig(Section):
    """Settings that select cheaper, preemptible nodes, added to the pods' other settings."""

    node_selector: dict[str, str] = Field(default={}, description="Labels that a node must have.")
    tolerations: list[dict[str, Any]] = Field(
        default=[], description="Tolerations of node taints, as in a pod spec."
    )


class PodsConfig(Section):
    """The pods that train on a cluster, one per node. None of these settings affects the result."""

    image: str | None = Field(
        None,
        description="Image of the training pods. None means the image of the train step's own pod.",
    )
    cpu: Cores = Field(
        "4",
        description="CPU cores that each pod requests. There is no limit, so a pod may use more "
        "if its node has them.",
    )
    memory: Quantity = Field("16Gi", description="Memory of each pod, as both request and limit.")
    gpus: int | None = Field(
        None,
        ge=0,
        description="GPUs of each pod. None means one per rank if compute.device is cuda, and "
        "0 otherwise.",
    )
    gpu_resource: str = Field(
        "nvidia.com/gpu", description="Resource name under which nodes offer GPUs."
    )
    shared_memory: Quantity = Field(
        "2Gi", description="Size of /dev/shm, which counts toward the pod's memory."
    )
    temporary_storage: Quantity = Field(
        "50Gi",
        description="Limit on what each pod writes to /tmp and its logs. Models from a hub are "
        "downloaded to /tmp.",
    )
    service_account: str | None = Field(
        None,
        description="Service account of the training pods. It needs no rights. None means the "
        "namespace's default account.",
    )
    node_selector: dict[str, str] = Field(default={}, description="Labels that a node must have.")
    tolerations: list[dict[str, Any]] = Field(
        default=[], description="Tolerations of node taints, as in a pod spec."
    )
    affinity: dict[str, Any] = Field(default={}, description="Affinity rules, as in a pod spec.")
    spot: SpotConfig = SpotConfig()
    priority_class: str | None = Field(
        None,
        description="Priority class, which decides which pods these may preempt. None means the "
        "cluster's default.",
    )
    labels: dict[str, str] = Field(
        default={}, description="Labels of each training job, such as kueue.x-k8s.io/queue-name."
    )
    env: list[PodVariable] = Field(
        default=[],
        description="Environment variables of the training pods, such as NCCL_DEBUG or "
        "HTTPS_PROXY, as in a pod spec: name and value, or name and valueFrom.secretKeyRef. They "
        "override those of the train step's own pod.",
    )
    volumes: list[VolumeConfig] | None = Field(
        None, description="Volumes to mount. None means the volumes of the train step's own pod."
    )
    pending_timeout_seconds: Seconds = Field(
        1800,
        gt=0,
        description="Seconds that a pod may wait for a node or quota. The attempts in a row share "
        "this time if a registry does not answer.",
    )

    @field_validator("env")
    @classmethod
    def _once_each(cls, env: list[PodVariable]) -> list[PodVariable]:
        names = [item.name for item in env]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} occurs twice: list each variable once")
        return env

    @property
    def cores(self) -> float:
        """CPU cores that each pod requests."""
        thousandths = self.cpu.endswith("m")
        return float(self.cpu.removesuffix("m")) / (1000 if thousandths else 1)


class ComputeConfig(Section):
    """Where and how training runs."""

    launcher: Annotated[Launcher, Effect.HANDLING] = Field(
        "auto",
        description="Where training runs. process: on this machine; trainjob: in pods through "
        "Kubeflow Trainer v2; pytorchjob: in pods through the older Training Operator; auto: in "
        "pods if this is a pipeline step on a cluster that has either of them, otherwise on this "
        "machine.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device to train on. auto: cuda if there is a GPU, otherwise cpu."
    )
    nodes: int = Field(1, ge=1, description="Number of machines. On a cluster, each one is a pod.")
    nproc_per_node: int = Field(1, ge=1, description="Ranks (training processes) on each node.")
    threads_per_rank: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each rank. None means the node's cores divided by its ranks. "
        "In a training pod, only the cores that it requests count.",
    )
    strategy: Annotated[str, AfterValidator(check_strategy), Use.MEMORY] = Field(
        AUTO,
        description="How ranks share the work and the memory. ddp: each rank has the complete "
        "model; zero1, zero2, zero3 (DeepSpeed): ranks shard the optimizer state, also the "
        "gradients, also the weights; fsdp (PyTorch): ranks shard all three; auto: single on one "
        "rank, otherwise ddp. Installed packages may add others.",
    )
    prefer: Annotated[Literal["native", "deepspeed"] | None, IfSet(), Use.MEMORY] = Field(
        None,
        description="Which library shards a model, if `strategy` is auto and `plan`, or a run on a "
        "GPU of its table, chooses a strategy that shards. native: PyTorch's FSDP at every size; "
        "deepspeed: ZeRO-2, then ZeRO-3, and only ZeRO-3 from 10 billion parameters. None means "
        "FSDP below 10 billion parameters and ZeRO-3 above.",
    )
    offload: Annotated[Offload, Use.MEMORY] = Field(
        "none",
        description="What to keep elsewhere instead of in GPU memory. optimizer: the optimizer "
        "state, in host memory; all: everything including the weights, in host memory; disk: the "
        "optimizer state, in files below offload_path. It needs a strategy that shards them, and "
        "for disk zero3.",
    )
    offload_path: Annotated[str | None, Field(pattern=r"^/.+"), Effect.HANDLING, IfSet()] = Field(
        None,
        description="Absolute path of a folder on each node's own disk for compute.offload disk. "
        "Each run has a folder of its own in it, which is removed when training ends. None means a "
        "folder of the run.",
    )
    nccl: Annotated[dict[str, Annotated[str, BeforeValidator(_as_text)]], Effect.PODS, IfSet()] = (
        Field(
            default={},
            description="Settings of NCCL for the ranks, by the names of its documentation, such "
            "as {NCCL_SOCKET_IFNAME: eth0, NCCL_DEBUG: INFO}. They override the environment of "
            "this process. With NCCL_DEBUG=INFO, `explain` and the report summarize what NCCL "
            "says.",
        )
    )
    pods: Annotated[PodsConfig, Effect.PODS] = PodsConfig()
    price_per_hour: Annotated[float | None, Effect.COST] = Field(
        None,
        ge=0,
        description="USD per hour for all nodes together, used only to compute the cost. It does "
        "not affect training, and it may change when a run continues. None means the cost is "
        "unknown.",
    )
    budget_usd: Annotated[float | None, Effect.COST, IfSet()] = Field(
        None,
        gt=0,
        description="USD that training may cost. `plan` and `design` choose the fastest GPU within "
        "it, and report a configuration that costs more as a problem. A run does not stop at it. "
        "None means no limit.",
    )

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.nproc_per_node

    @property
    def gpus_of_a_node(self) -> int:
        """GPUs that each pod requests."""
        if self.pods.gpus is not None:
            return self.pods.gpus
        return self.nproc_per_node if self.device == "cuda" else 0

    @model_validator(mode="after")
    def _prefers_or_sets(self) -> Self:
        if self.prefer is not None and self.strategy != AUTO:
            raise at_odds(
                "compute.prefer",
                self.prefer,
                f"it is for an open strategy, and compute.strategy is {self.strategy}",
                "leave one of the two out",
            )
        return self

    @field_validator("nccl")
    @classmethod
    def _settings_exist(cls, nccl: dict[str, str]) -> dict[str, str]:
        if unknown := next(filter(None, map(unknown_variable, nccl)), ""):
            raise ValueError(unknown)
        return nccl

    @model_validator(mode="after")
    def _nccl_is_used(self) -> Self:
        if self.nccl and self.device == "cpu":
            raise at_odds(
                "compute.nccl",
                self.nccl,
                "compute.device is cpu, whose ranks use gloo",
                "leave it out, or train on GPUs",
            )
        if twice := sorted(self.nccl.keys() & {item.name for item in self.pods.env}):
            raise at_odds(
                "compute.nccl",
                self.nccl,
                f"compute.pods.env sets {', '.join(twice)} too",
                "set each in one place",
            )
        return self

    @field_validator("strategy", mode="before")
    @classmethod
    def _none_cuts_layers(cls, value: object) -> object:
        if isinstance(value, str) and value in _WITHIN_LAYERS:
            raise at_odds(
                "compute.strategy",
                value,
                "steadytrain does not split a layer, or a chain of layers, across GPUs",
                "use fsdp or zero3, which shard the weights over the ranks and are enough for "
                "about 100 billion parameters; larger models need tensor and pipeline "
                "parallelism, as in Megatron-LM, and a fast connection within each node",
            )
        return value

    @model_validator(mode="after")
    def _ranks_are_not_too_many(self) -> ComputeConfig:
        most = None if self.strategy == AUTO else strategy_spec(self.strategy).max_ranks
        if most is not None and self.world_size > most:
            raise at_odds(
                "compute.strategy",
                self.strategy,
                f"it has {'one rank' if most == 1 else f'at most {most} ranks'}, and compute asks "
                f"for {self.world_size}",
                "use ddp or a sharding strategy, or lower nodes x nproc_per_node",
            )
        return self

    @model_validator(mode="after")
    def _only_what_is_sharded_is_offloaded(self) -> ComputeConfig:
        offloads = () if self.strategy == AUTO else strategy_spec(self.strategy).offloads
        if self.offload not in ("none", *offloads):
            raise at_odds(
                "compute.offload",
                self.offload,
                f"compute.strategy {self.strategy} cannot do that",
                f"one of these can: {', '.join(strategies_that_offload(self.offload))}",
            )
        return self

    @model_validator(mode="after")
    def _only_files_have_a_path(self) -> Self:
        if self.offload_path is not None and self.offload != DISK:
            raise at_odds(
                "compute.offload_path",
                self.offload_path,
                f"compute.offload is {self.offload}, which writes no files",
                f"set compute.offload to {DISK}, or leave it out",
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
