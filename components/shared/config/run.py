"""RunConfig: the single place for all settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.batch import REPLICATED
from steadytrain.components.shared.config.compatibility import conflicts, obstacles
from steadytrain.components.shared.config.compute import ComputeConfig
from steadytrain.components.shared.config.data import DataConfig
from steadytrain.components.shared.config.data_sections import (
    MIXED,
    MULTI_LABEL,
    MULTI_TASK,
)
from steadytrain.components.shared.config.document import dump, saved_text
from steadytrain.components.shared.config.evaluation import (
    EvaluationConfig,
    GateConfig,
    RegistryConfig,
    RetrainConfig,
    TrackingConfig,
)
from steadytrain.components.shared.config.model import ModelConfig
from steadytrain.components.shared.config.operations import (
    ObservabilityConfig,
    PipelineConfig,
    RecoveryConfig,
)
from steadytrain.components.shared.config.optimizers import (
    DEFAULT,
    check_settings,
    optimizer_spec,
)
from steadytrain.components.shared.config.schedules import schedule_spec
from steadytrain.components.shared.config.training import TrainingConfig
from steadytrain.components.shared.config.tune import (
    AblationConfig,
    AutoMLConfig,
    CrossValidationConfig,
    TuneConfig,
)
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.effects import Effect, Folder, Section, Use, at_odds, counted
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
_SETTINGS: Final = {
    PROMETHEUS: "observability.prometheus_port",
    DIAGNOSIS: "observability.diagnosis",
    ALERTS: "STEADYTRAIN_WEBHOOK_URL in the environment",
}
"""By those sinks, what turns them on."""
_INSTEAD: Final = {
    "training.optim": DEFAULT,
    "compute.strategy": REPLICATED,
    "model.adapter.kind": "lora",
    "training.attention": "sdpa",
}
"""By field, the value that supports the most."""


class RunConfig(Section):
    """All settings of one run. Immutable; two equal configurations are the same run."""

    schema_version: Annotated[Literal[1], Effect.FORMAT] = Field(
        SCHEMA_VERSION, description="Version of the configuration format."
    )
    name: Annotated[str, Effect.NAMES] = Field(
        ...,
        pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$",
        description="Name of the model and its runs.",
    )
    run: Annotated[str | None, Effect.PLACE] = Field(
        None,
        pattern=RUN_NAME,
        description="Name of this run. None means `name` plus a digest of the configuration, so "
        "the same configuration continues the same run.",
    )
    output: Annotated[Folder, Effect.PLACE] = Field(
        "steadytrain-output",
        description="Folder for data, checkpoints, the ledger and reports. On a cluster, it must "
        "be on the shared volume.",
    )
    data: Annotated[DataConfig, Effect.DATA]
    model: Annotated[ModelConfig, Effect.LEARNED]
    training: Annotated[TrainingConfig, Effect.LEARNED] = TrainingConfig()
    compute: Annotated[ComputeConfig, Effect.ROUNDING] = ComputeConfig()
    pipeline: Annotated[PipelineConfig, Effect.PIPELINE] = PipelineConfig()
    recovery: Annotated[RecoveryConfig, Effect.RECOVERY] = RecoveryConfig()
    evaluation: Annotated[EvaluationConfig, Effect.SCORES] = EvaluationConfig()
    gate: Annotated[GateConfig, Effect.GATE] = GateConfig()
    registry: Annotated[RegistryConfig, Effect.NAMES] = RegistryConfig()
    tracking: Annotated[TrackingConfig, Effect.TRACKING] = TrackingConfig()
    observability: Annotated[ObservabilityConfig, Effect.WATCHED] = ObservabilityConfig()
    retrain: Annotated[RetrainConfig, Effect.RETRAINING] = RetrainConfig()
    tune: Annotated[TuneConfig, Effect.STUDY] = TuneConfig()
    ablation: Annotated[AblationConfig, Effect.STUDY] = AblationConfig()
    cross_validation: Annotated[CrossValidationConfig, Effect.STUDY] = CrossValidationConfig()
    automl: Annotated[AutoMLConfig, Effect.STUDY] = AutoMLConfig()

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
    def _combination_is_supported(self) -> Self:
        for rule, setting, feature in conflicts(self):
            other = _INSTEAD.get(setting.field)
            instead = f"use {other}" if other else f"leave {setting.field} out"
            raise at_odds(
                setting.field,
                setting.value,
                f"{rule.why}, and {feature.field} is {feature.value}",
                f"{instead}, or change {feature.field}",
            )
        return self

    @model_validator(mode="after")
    def _attention_is_given_once(self) -> Self:
        given = self.model.config.get("attn_implementation")
        if given is not None and self.training.attention != "auto":
            raise at_odds(
                "training.attention",
                self.training.attention,
                f"model.config.attn_implementation is {given}",
                "leave one of the two out",
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

    @model_validator(mode="after")
    def _optimizer_reads_its_settings(self) -> Self:
        check_settings(self.training)
        return self

    @model_validator(mode="after")
    def _rate_falls_to_the_last_one(self) -> Self:
        peak, kind = self.training.learning_rate, self.training.lr_scheduler_type
        last = schedule_spec(kind).last_rate
        scale = self.training.rate_scale
        if peak is not None and peak * scale <= last:
            scaled = f", and training.lr_scaling makes it {peak * scale:g}" if scale != 1 else ""
            raise at_odds(
                "training.learning_rate",
                peak,
                f"training.lr_scheduler_type {kind} ends with {last}{scaled}",
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
    def _weights_are_of_the_labels(self) -> Self:
        given, labels = self.training.class_weights.given, self.data.labels
        if given and labels is not None and given.keys() != set(labels):
            raise at_odds(
                "training.class_weights.given",
                given,
                f"data.labels are {', '.join(labels)}",
                "give one weight for each of them",
            )
        return self

    @model_validator(mode="after")
    def _weights_are_of_the_parts(self) -> Self:
        multi_task, parts = self.training.multi_task, self.data.parts
        for name in ("sampling_weights", "loss_weights"):
            self._has_each_part(f"multi_task.{name}", getattr(multi_task, name), "weight")
        mixture = self.training.mixture
        if mixture.on and not self.data.mixture:
            raise at_odds(
                "training.mixture",
                mixture.model_dump(exclude_defaults=True),
                f"data.task is {self.data.task}, data.parts are {', '.join(parts) or 'not set'}",
                f"give data.parts with data.task {' or '.join(MIXED)}, or leave it out",
            )
        for name in ("weights", "tokens"):
            self._has_each_part(f"mixture.{name}", getattr(mixture, name), "number")
        return self

    def _has_each_part(self, field: str, given: Mapping[str, float], what: str) -> None:
        parts = self.data.parts
        if given and given.keys() != parts.keys():
            raise at_odds(
                f"training.{field}",
                given,
                f"data.parts are {', '.join(parts) or 'not set'}",
                f"give one {what} for each of them",
            )

    @model_validator(mode="after")
    def _thresholds_are_of_the_task(self) -> Self:
        thresholds, task = self.training.label_thresholds, self.data.task
        if (
            thresholds != type(self.training).model_fields["label_thresholds"].default
            and task != MULTI_LABEL
            and plugins.is_ours(plugins.TASKS, task)
        ):
            raise at_odds(
                "training.label_thresholds",
                thresholds,
                f"data.task {task} has no such thresholds",
                f"leave it out, or use data.task {MULTI_LABEL}",
            )
        return self

    @model_validator(mode="after")
    def _parts_have_a_limit(self) -> Self:
        if self.data.task == MULTI_TASK and self.gate.max_slice_regression is None:
            raise at_odds(
                "gate.max_slice_regression",
                None,
                "the gate needs to know how much worse a model may be in one of data.parts",
                "for example 0.02",
            )
        return self

    @model_validator(mode="after")
    def _parts_have_no_folds(self) -> Self:
        if self.data.parts and self.cross_validation.fold is not None:
            raise at_odds(
                "cross_validation.fold",
                self.cross_validation.fold,
                "a text that is in several of data.parts would be in several folds",
                "leave it out, or learn one data set",
            )
        return self

    @model_validator(mode="after")
    def _time_has_one_order(self) -> Self:
        if self.data.in_time and self.cross_validation.repeats > 1:
            raise at_odds(
                "cross_validation.repeats",
                self.cross_validation.repeats,
                "the folds follow each other in time, so there is one division",
                "leave it out, or raise cross_validation.folds",
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
        optim = self.training.optim
        needs = "cpu" in optimizer_spec(optim).unsupported
        return [("training.optim", optim, DEFAULT)] if needs else []

    def conflict_with(self, feature: str) -> str:
        """Return the setting that does not support a feature, and why; "" if none.

        Args:
            feature: the name of a strategy, or a key of `compatibility.FEATURES`.
        """
        return next((f"{name}: {why}" for name, why in obstacles(self, feature)), "")

    def not_supported_by(self, strategy: str) -> str:
        """Return the setting other than the optimizer that does not support a strategy.

        As field and value; "" if there is none.
        """
        names = (name for name, _ in obstacles(self, strategy))
        return next((name for name in names if not name.startswith("training.optim ")), "")

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

    def counted(self, use: Use) -> dict[str, Any]:
        """Return the fields that count for a use, as plain data."""
        result = counted(self, use)
        if self.cross_validation.fold is None and use is not Use.STUDY:
            # Without a fold, no run reads the number of folds.
            result.pop("cross_validation", None)
        return result

    @cached_property
    def _digest(self) -> str:
        return value_digest(self.counted(Use.RUN))

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the settings that make a run another one."""
        return self._digest

    def to_yaml(self) -> str:
        """Return the full configuration, including defaults, as YAML that reads back equal."""
        return dump(self.model_dump(mode="json"))

    def to_saved(self) -> bytes:
        """Return the same as the content of a file that a run reads back, with digests."""
        return saved_text(self.model_dump(mode="json")).encode()
