"""RunConfig: the single place for all settings of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.ablation import AblationConfig
from steadytrain.components.shared.config.base import Folder, Section, at_odds
from steadytrain.components.shared.config.compute import ComputeConfig
from steadytrain.components.shared.config.cross_validation import CrossValidationConfig
from steadytrain.components.shared.config.data import DataConfig
from steadytrain.components.shared.config.document import dump
from steadytrain.components.shared.config.evaluation import (
    EvaluationConfig,
    GateConfig,
    RegistryConfig,
    RetrainConfig,
    TrackingConfig,
)
from steadytrain.components.shared.config.model import ModelConfig
from steadytrain.components.shared.config.observability import ObservabilityConfig
from steadytrain.components.shared.config.optimizers import DEFAULT, optimizer_spec
from steadytrain.components.shared.config.pipeline import PipelineConfig
from steadytrain.components.shared.config.recovery import RecoveryConfig
from steadytrain.components.shared.config.schedules import schedule_spec
from steadytrain.components.shared.config.strategies import AUTO, strategy_features, strategy_spec
from steadytrain.components.shared.config.training import (
    TrainingConfig,
    identifying,
)
from steadytrain.components.shared.config.tune import TuneConfig
from steadytrain.components.shared.errors import BadInput

SCHEMA_VERSION: Final = 1
RUN_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$"
"""Valid names of a run. The name is also used for its folder, for jobs, and for labels in a
cluster."""
PROMETHEUS: Final = "prometheus"
DIAGNOSIS: Final = "diagnosis"
ALERTS: Final = "alerts"
"""Names of the sinks that the section `observability` or the environment turns on, because a
setting of `tracking` would make a different run."""
SMALLER_MICRO_BATCH: Final = "smaller micro-batch"
"""What an objective that compares the rows of a micro-batch does not support."""
_SETTINGS: Final = {
    PROMETHEUS: "observability.prometheus_port",
    DIAGNOSIS: "observability.diagnosis",
    ALERTS: "STEADYTRAIN_WEBHOOK_URL in the environment",
}
"""By those sinks, what turns them on."""
_NOT_WHAT_IT_DOES: Final[Mapping[str, bool | set[str]]] = {
    "retrain": True,
    "tune": True,
    "ablation": True,
    "cross_validation": True,
    "run": True,
    "output": True,
    "pipeline": True,
    "observability": True,
    "compute": {"price_per_hour", "pods"},
    "gate": {"compared"},
}


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
    output: Folder = Field(
        "steadytrain-output",
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
    observability: ObservabilityConfig = ObservabilityConfig()
    retrain: RetrainConfig = RetrainConfig()
    tune: TuneConfig = TuneConfig()
    ablation: AblationConfig = AblationConfig()
    cross_validation: CrossValidationConfig = CrossValidationConfig()

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
        micro = self.training.micro_batch
        if micro is not None and (batch // ranks) % micro:
            contrasts = self.training.batch_contrastive.on
            raise at_odds(
                f"training.{'batch_contrastive.rows' if contrasts else 'micro_batch_size'}",
                micro,
                f"does not divide the {batch // ranks} sequences that each rank has in a global "
                "batch",
                "use a divisor of that number, or leave it out",
            )
        return self

    @model_validator(mode="after")
    def _strategy_supports_it(self) -> Self:
        strategy = self.compute.strategy
        setting = "" if strategy == AUTO else self.not_supported_by(strategy)
        if setting:
            raise at_odds(
                "compute.strategy",
                strategy,
                f"it does not support {setting}: {strategy_spec(strategy).unsupported[setting]}",
                f"use ddp, or change {setting.partition(' ')[0]}",
            )
        return self

    @model_validator(mode="after")
    def _optimizer_supports_it(self) -> Self:
        unsupported = optimizer_spec(self.training.optim).unsupported
        for feature, field, value in self._features():
            if why := unsupported.get(feature):
                raise at_odds(
                    "training.optim",
                    self.training.optim,
                    f"{why}, and {field} is {value}",
                    f"use {DEFAULT}, or change {field}",
                )
        return self

    @model_validator(mode="after")
    def _plugins_take_their_options(self) -> Self:
        training = self.training
        for field, name, spec, options in (
            ("optim_args", training.optim, optimizer_spec, training.optim_args),
            (
                "lr_scheduler_kwargs",
                training.lr_scheduler_type,
                schedule_spec,
                training.lr_scheduler_kwargs,
            ),
        ):
            try:
                if options:
                    plugins.call(spec(name).options, options, name)
            except BadInput as error:
                raise at_odds(f"training.{field}", options, error.message, error.remedy) from None
        return self

    def _features(self) -> Iterator[tuple[str, str, str]]:
        """Yield what an optimizer may not support, and the field and value that ask for it."""
        training, compute = self.training, self.compute
        if compute.device == "cpu":
            yield "cpu", "compute.device", "cpu"
        if compute.strategy != AUTO:
            for feature in sorted(strategy_features(compute.strategy)):
                yield feature, "compute.strategy", compute.strategy
        if compute.offload != "none":
            yield "cpu", "compute.offload", compute.offload
        if training.bf16:
            yield "bf16", "training.bf16", "true"
        if training.fp16:
            yield "fp16", "training.fp16", "true"
        if schedule_spec(training.lr_scheduler_type).changes:
            yield "schedule", "training.lr_scheduler_type", training.lr_scheduler_type
        averages = [("training.components", name) for name in training.exporting_components]
        if training.averaging.on:
            averages.append(("training.averaging.kind", training.averaging.kind))
        yield from (("averaging", *each) for each in averages)
        if training.adam_beta1 == 0:
            yield "adam_beta1 0", "training.adam_beta1", "0"

    @model_validator(mode="after")
    def _rate_falls_to_the_last_one(self) -> Self:
        peak, kind = self.training.learning_rate, self.training.lr_scheduler_type
        last = schedule_spec(kind).last_rate
        if peak is not None and peak <= last:
            raise at_odds(
                "training.learning_rate",
                peak,
                f"training.lr_scheduler_type {kind} ends with {last}",
                "use a higher one, or another training.lr_scheduler_type",
            )
        return self

    @model_validator(mode="after")
    def _adapters_need_a_base(self) -> Self:
        if self.model.adapter.freezes and self.model.base is None:
            raise at_odds(
                "model.adapter.kind",
                self.model.adapter.kind,
                "there is no model.base, and adapters cannot learn on frozen random weights",
                "set model.base to a trained model, or set this to none",
            )
        return self

    @model_validator(mode="after")
    def _only_pytorch_has_objectives(self) -> Self:
        own = [*self.training.objectives, *(["curriculum"] if self.training.curriculum.on else [])]
        for name in own if self.model.framework != "pytorch" else ():
            raise at_odds(
                f"training.{name}",
                getattr(self.training, name).model_dump(exclude_unset=True),
                f"the loop of model.framework {self.model.framework} does not read it",
                "leave it out, or use model.framework pytorch",
            )
        return self

    @model_validator(mode="after")
    def _fewer_nodes_keep_the_micro_batch(self) -> Self:
        if self.training.batch_contrastive.on and self.recovery.min_nodes is not None:
            raise at_odds(
                "recovery.min_nodes",
                self.recovery.min_nodes,
                "on fewer nodes the micro-batch may change, and training.batch_contrastive "
                "compares the rows of a micro-batch",
                "leave one of the two out",
            )
        return self

    @model_validator(mode="after")
    def _a_cpu_has_no_4_bit(self) -> Self:
        if self.compute.device == "cpu" and self.model.adapter.kind == "qlora":
            raise at_odds(
                "model.adapter.kind",
                "qlora",
                "its kernels need a CUDA device, and compute.device is cpu",
                "use lora, or train on a GPU",
            )
        return self

    @model_validator(mode="after")
    def _observability_opens_its_sinks(self) -> Self:
        for name, field in _SETTINGS.items():
            if name in self.tracking.sinks:
                raise at_odds(
                    "tracking.sinks",
                    self.tracking.sinks,
                    f"names {name}, which is turned on elsewhere",
                    f"leave it out there, and set {field}",
                )
        return self

    @model_validator(mode="after")
    def _tasks_for_the_gate(self) -> Self:
        asked = [("gate.floors", name) for name in self.gate.floors if "/" in name]
        if self.gate.task_metric:
            asked.append(("gate.metric", self.gate.task_metric))
        if asked and not self.evaluation.tasks:
            raise at_odds(
                *asked[0],
                "is a metric of a task, and evaluation.tasks is empty",
                "add the task to evaluation.tasks",
            )
        return self

    @property
    def only_cuda(self) -> list[tuple[str, str, str]]:
        """The settings that need CUDA, as (field, value, replacement on a CPU)."""
        kind, optim = self.model.adapter.kind, self.training.optim
        found: list[tuple[str, str, str]] = []
        if kind == "qlora":
            found.append(("model.adapter.kind", kind, "lora"))
        if "cpu" in optimizer_spec(optim).unsupported:
            found.append(("training.optim", optim, DEFAULT))
        return found

    def conflict_with(self, feature: str) -> str:
        """Return the setting that does not support something, as field and value; "" if none.

        Args:
            feature: the name of a strategy, "cpu", or SMALLER_MICRO_BATCH.
        """
        if feature == SMALLER_MICRO_BATCH:
            on = self.training.batch_contrastive.on
            return (
                "training.batch_contrastive, which compares the rows of a micro-batch" if on else ""
            )
        setting, needed = "", {feature}
        if feature != "cpu":
            setting, needed = self.not_supported_by(feature), strategy_features(feature)
        optim = self.training.optim
        if not setting and needed & optimizer_spec(optim).unsupported.keys():
            setting = f"training.optim {optim}"
        return setting

    def not_supported_by(self, strategy: str) -> str:
        """Return the setting that a strategy does not support, apart from the optimizer.

        As field and value; "" if there is none.
        """
        training, adapter = self.training, self.model.adapter
        settings = [
            *(["training.torch_compile"] if training.torch_compile else []),
            *(["training.fp16"] if training.fp16 else []),
            *(["training.monitor.layers"] if training.monitor.layers else []),
            f"model.adapter.kind {adapter.kind}",
            adapter.lightened,
        ]
        unsupported = strategy_spec(strategy).unsupported
        return next((setting for setting in settings if setting in unsupported), "")

    @property
    def sinks(self) -> tuple[str, ...]:
        """The sinks that receive training events: of `tracking`, then of `observability`."""
        watching = self.observability
        return (
            *self.tracking.sinks,
            *([PROMETHEUS] if watching.prometheus_port is not None else []),
            *([DIAGNOSIS] if watching.diagnosis else []),
        )

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
        content["training"] = identifying(content["training"])
        if fold := self.cross_validation.identifying():
            content["cross_validation"] = fold
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_yaml(self) -> str:
        """Return the full configuration, including defaults, as YAML that reads back equal."""
        return dump(self.model_dump(mode="json"))
