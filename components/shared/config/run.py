"""RunConfig: the single place for all settings of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

import yaml
from pydantic import Field, model_validator

from steadytrain.components.shared.config.base import Section, at_odds
from steadytrain.components.shared.config.compute import ComputeConfig
from steadytrain.components.shared.config.data import DataConfig
from steadytrain.components.shared.config.evaluation import (
    EvaluationConfig,
    GateConfig,
    RegistryConfig,
    RetrainConfig,
    TrackingConfig,
)
from steadytrain.components.shared.config.model import ModelConfig
from steadytrain.components.shared.config.pipeline import PipelineConfig
from steadytrain.components.shared.config.strategies import AUTO, strategy_spec
from steadytrain.components.shared.config.training import RecoveryConfig, TrainingConfig

SCHEMA_VERSION: Final = 1
RUN_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$"
"""Valid names of a run. The name is also used for its folder, for jobs, and for labels in a
cluster."""
_NOT_WHAT_IT_DOES: Final[Mapping[str, bool | set[str]]] = {
    "retrain": True,
    "run": True,
    "output": True,
    "pipeline": True,
    "compute": {"price_per_hour", "pods"},
}
_ONLY_CUDA: Final = {
    "qlora": "lora",
    "adamw_bnb_8bit": "adamw_torch",
    "paged_adamw_8bit": "adamw_torch",
}
"""Values that need CUDA, and their replacements on a CPU."""


class RunConfig(Section):
    """All settings of one run. Immutable; two equal configurations are the same run."""

    schema_version: Literal[1] = Field(
        SCHEMA_VERSION, description="Version of the configuration format."
    )
    name: str = Field(
        ...,
        pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$",
        description="Name of the model and its runs.",
    )
    run: str | None = Field(
        None,
        pattern=RUN_NAME,
        description="Name of this run. None means `name` plus a digest of the configuration, so "
        "the same configuration continues the same run.",
    )
    output: str = Field(
        "steadytrain-output",
        min_length=1,
        description="Folder for data, checkpoints, the ledger and reports. On a cluster, it must "
        "be on the shared volume.",
    )
    data: DataConfig
    model: ModelConfig
    training: TrainingConfig = TrainingConfig()
    compute: ComputeConfig = ComputeConfig()
    pipeline: PipelineConfig = PipelineConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: GateConfig = GateConfig()
    registry: RegistryConfig = RegistryConfig()
    tracking: TrackingConfig = TrackingConfig()
    retrain: RetrainConfig = RetrainConfig()

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        ranks, batch = self.compute.world_size, self.training.global_batch_size
        if batch % ranks:
            nodes = f" x compute.nodes {self.compute.nodes}" if self.compute.nodes > 1 else ""
            raise at_odds(
                "training.global_batch_size",
                batch,
                f"is not divisible by compute.nproc_per_node {self.compute.nproc_per_node}{nodes}",
                f"for example {batch - batch % ranks or ranks}",
            )
        micro = self.training.micro_batch_size
        if micro is not None and (batch // ranks) % micro:
            raise at_odds(
                "training.micro_batch_size",
                micro,
                f"does not divide the {batch // ranks} sequences that each rank has in a global "
                "batch",
                "take a divisor of them, or leave it out",
            )
        return self

    @model_validator(mode="after")
    def _strategy_supports_it(self) -> Self:
        strategy = self.compute.strategy
        setting = "" if strategy == AUTO else self.conflict_with(strategy)
        if setting:
            raise at_odds(
                "compute.strategy",
                strategy,
                f"it does not support {setting}: {strategy_spec(strategy).unsupported[setting]}",
                f"take ddp, or change {setting.partition(' ')[0]}",
            )
        return self

    @model_validator(mode="after")
    def _adapters_need_a_base(self) -> Self:
        if self.model.adapter.freezes and self.model.base is None:
            raise at_odds(
                "model.adapter.kind",
                self.model.adapter.kind,
                "there is no model.base, and beside weights that stay random nothing is learned",
                "name a trained model, or take none",
            )
        return self

    @model_validator(mode="after")
    def _a_classifiers_head_is_trained(self) -> Self:
        bits = self.model.adapter.frozen_head
        if self.data.task == "sequence_classification" and bits != "as_loaded":
            raise at_odds(
                "model.adapter.frozen_head",
                bits,
                "the head of sequence_classification is new and is trained",
                "leave it out",
            )
        return self

    @model_validator(mode="after")
    def _a_cpu_has_no_8_bit(self) -> Self:
        if self.compute.device == "cpu":
            for field, value, instead in self.only_cuda:
                raise at_odds(
                    field,
                    value,
                    "its kernels need a CUDA device, and compute.device is cpu",
                    f"take {instead}, or train on a GPU",
                )
        return self

    @model_validator(mode="after")
    def _tasks_for_the_gate(self) -> Self:
        tasks = self.evaluation.tasks
        if tasks and self.data.task == "sequence_classification":
            raise at_odds(
                "evaluation.tasks",
                tasks,
                "lm-eval's tasks are for language models, and data.task is sequence_classification",
                "leave them out",
            )
        asked = [("gate.floors", name) for name in self.gate.floors if "/" in name]
        if self.gate.task_metric:
            asked.append(("gate.metric", self.gate.task_metric))
        if asked and not tasks:
            raise at_odds(
                *asked[0],
                "is of a task, and evaluation.tasks names none",
                "add the task to evaluation.tasks",
            )
        return self

    @property
    def only_cuda(self) -> list[tuple[str, str, str]]:
        """The settings that need CUDA, as (field, value, replacement on a CPU)."""
        told = {
            "model.adapter.kind": self.model.adapter.kind,
            "training.optim": self.training.optim,
        }
        return [
            (field, value, _ONLY_CUDA[value])
            for field, value in told.items()
            if value in _ONLY_CUDA
        ]

    def conflict_with(self, strategy: str) -> str:
        """Return the setting that a strategy does not support, as field and value; "" if none."""
        training, adapter = self.training, self.model.adapter
        settings = [
            f"training.optim {training.optim}",
            f"model.adapter.kind {adapter.kind}",
            adapter.lightened,
        ]
        if training.fp16:
            settings.insert(0, "training.fp16")
        if training.torch_compile:
            settings.insert(0, "training.torch_compile")
        unsupported = strategy_spec(strategy).unsupported
        return next((setting for setting in settings if setting in unsupported), "")

    @property
    def run_id(self) -> str:
        """Identity of the run. Equal configurations have the same identity."""
        return self.run or f"{self.name}-{self.digest()[:8]}"

    @property
    def model_name(self) -> str:
        """Name of the registered model."""
        return self.registry.model_name or self.name

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the settings that affect the result, as canonical JSON."""
        content = self.model_dump(mode="json", exclude=_NOT_WHAT_IT_DOES)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_yaml(self) -> str:
        """Return the full configuration, including defaults, as YAML that reads back equal."""
        content: dict[str, Any] = self.model_dump(mode="json")
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        # PyYAML writes line separators other than \n unescaped, but reads them back as \n.
        ends = any(end in text for end in ("\x85", "\u2028", "\u2029"))
        return yaml.safe_dump(content, sort_keys=False) if ends else text
