"""What a configuration asks for, in the words of the compatibility table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from steadytrain.components.shared.config.compute import ComputeConfig
from steadytrain.components.shared.config.data import DataConfig
from steadytrain.components.shared.config.evaluation import EvaluationConfig
from steadytrain.components.shared.config.model import AdapterConfig, ModelConfig
from steadytrain.components.shared.config.recovery import RecoveryConfig
from steadytrain.components.shared.config.schedules import schedule_spec
from steadytrain.components.shared.config.strategies import AUTO, strategy_features
from steadytrain.components.shared.config.training import TrainingConfig

PAIR: Final = "data.columns.text_pair"
OPTIM: Final = "training.optim"
STRATEGY: Final = "compute.strategy"


class Combination(Protocol):
    """The sections of a RunConfig that rules are about."""

    @property
    def compute(self) -> ComputeConfig: ...

    @property
    def data(self) -> DataConfig: ...

    @property
    def evaluation(self) -> EvaluationConfig: ...

    @property
    def model(self) -> ModelConfig: ...

    @property
    def recovery(self) -> RecoveryConfig: ...

    @property
    def training(self) -> TrainingConfig: ...


@dataclass(frozen=True)
class Asked:
    """The field and the value that ask for a feature."""

    field: str
    value: str


def asked_by(config: Combination) -> dict[str, Asked]:
    """Return the settings and features that a configuration asks for, by name."""
    found: dict[str, Asked] = {}
    for name, field, value in _asked(config):
        found.setdefault(name, Asked(field, value))
    return found


def _asked(config: Combination) -> Iterator[tuple[str, str, str]]:
    """Yield (name, field, value)."""
    yield from _by_compute(config.compute)
    yield from _by_optimizer(config.training)
    yield from _by_training(config.training)
    yield from _by_groups(config.training)
    yield from _by_adapter(config.model.adapter)
    yield f"data.task {config.data.task}", "data.task", config.data.task
    if config.data.parts:
        yield "data.parts", "data.parts", ", ".join(config.data.parts)
    if config.data.columns.text_pair:
        yield PAIR, PAIR, config.data.columns.text_pair
    if config.evaluation.landscape.on:
        field, points = "evaluation.landscape", config.evaluation.landscape.points
        yield field, f"{field}.points", str(points)
    if config.model.added_tokens:
        yield "model.added_tokens", "model.added_tokens", ", ".join(config.model.added_tokens)
    if config.model.framework != "pytorch":
        yield "another framework", "model.framework", config.model.framework
    if config.recovery.min_nodes is not None:
        yield "recovery.min_nodes", "recovery.min_nodes", str(config.recovery.min_nodes)


def _by_compute(compute: ComputeConfig) -> Iterator[tuple[str, str, str]]:
    if compute.device == "cpu":
        yield "cpu", "compute.device", "cpu"
    if compute.strategy != AUTO:
        for name in (f"{STRATEGY} {compute.strategy}", *strategy_features(compute.strategy)):
            yield name, STRATEGY, compute.strategy
    if compute.world_size == 1:
        yield "one rank", "compute.nproc_per_node", "1"
    if compute.offload != "none":
        yield "cpu", "compute.offload", compute.offload


def _by_optimizer(training: TrainingConfig) -> Iterator[tuple[str, str, str]]:
    yield f"{OPTIM} {training.optim}", OPTIM, training.optim
    schedule = training.lr_scheduler_type
    if schedule_spec(schedule).changes:
        yield "schedule", "training.lr_scheduler_type", schedule
    for name in training.exporting_components:
        yield "exporting component", "training.components", name
        yield "averaging", "training.components", name
    if training.adam_beta1 == 0:
        yield "adam_beta1 0", "training.adam_beta1", "0"


def _by_training(training: TrainingConfig) -> Iterator[tuple[str, str, str]]:
    for precision in ("bf16", "fp16"):
        if getattr(training, precision):
            yield precision, f"training.{precision}", "true"
    switches = {
        "training.bf16": training.bf16,
        "training.fp16": training.fp16,
        "training.torch_compile": training.torch_compile,
    }
    yield from ((field, field, "true") for field, on in switches.items() if on)
    if training.order != "seeded":
        for name in ("another order", f"training.order {training.order}"):
            yield name, "training.order", training.order
    for name in training.objectives:
        yield f"training.{name}", f"training.{name}", "on"
    for section in training.techniques:
        yield from section.asks()


def _by_groups(training: TrainingConfig) -> Iterator[tuple[str, str, str]]:
    for place, group in enumerate(training.param_groups):
        yield from group.asks(place)
    if training.layer_decay is not None:
        yield "training.layer_decay", "training.layer_decay", f"{training.layer_decay:g}"


def _by_adapter(adapter: AdapterConfig) -> Iterator[tuple[str, str, str]]:
    yield f"model.adapter.kind {adapter.kind}", "model.adapter.kind", adapter.kind
    if adapter.freezes:
        yield "adapters", "model.adapter.kind", adapter.kind
    if adapter.lightened:
        field, _, value = adapter.lightened.partition(" ")
        yield adapter.lightened, field, value
