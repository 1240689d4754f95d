"""Which settings cannot be combined, and why: the one table behind validation, fallbacks and docs.

A rule names a setting of a configuration and a feature that it does not support. Optimizers and
strategies, built in or of a package, have their rules in their specs, techniques in the settings in
their folder (`components/techniques`). All others are here. `RequestedFeature` is what a
configuration asks for, in the words of this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.compute import ComputeConfig
from steadytrain.components.shared.config.data import DataConfig
from steadytrain.components.shared.config.data_sections import TABLES
from steadytrain.components.shared.config.evaluation import EvaluationConfig
from steadytrain.components.shared.config.model import AdapterConfig, ModelConfig
from steadytrain.components.shared.config.operations import RecoveryConfig
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.shared.config.schedules import schedule_spec
from steadytrain.components.shared.config.strategies import AUTO, strategy_features, strategy_spec
from steadytrain.components.shared.config.training import TrainingConfig
from steadytrain.components.techniques.settings import (
    PYTORCH_ONLY,
    SMALLER_MICRO_BATCH,
    Rule,
    technique_rules,
)

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
class RequestedFeature:
    """The field and the value that ask for a feature."""

    field: str
    value: str


def requested_features(config: Combination) -> dict[str, RequestedFeature]:
    """Return the settings and features that a configuration asks for, by name."""
    result: dict[str, RequestedFeature] = {}
    for name, field, value in _features(config):
        result.setdefault(name, RequestedFeature(field, value))
    return result


def _features(config: Combination) -> Iterator[tuple[str, str, str]]:
    """Yield (name, field, value)."""
    yield from _by_compute(config.compute)
    yield from _by_optimizer(config.training)
    yield from _by_training(config.training)
    # The task of a table names the objectives that its own learners read (`Task.objectives`).
    for name in config.training.objectives if config.data.task not in TABLES else ():
        yield f"training.{name}", f"training.{name}", "on"
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
    if config.recovery.min_sequence_length is not None:
        least = config.recovery.min_sequence_length
        yield "recovery.min_sequence_length", "recovery.min_sequence_length", str(least)


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
    if training.attention != "auto":
        for name in ("training.attention", f"training.attention {training.attention}"):
            yield name, "training.attention", training.attention
    if training.order != "seeded":
        for name in ("another order", f"training.order {training.order}"):
            yield name, "training.order", training.order
    if training.lr_scaling != "none":
        yield "training.lr_scaling", "training.lr_scaling", training.lr_scaling
    for section in training.techniques:
        yield from section.features()


def _by_groups(training: TrainingConfig) -> Iterator[tuple[str, str, str]]:
    for index, group in enumerate(training.param_groups):
        yield from group.features(index)
    if training.layer_decay is not None:
        yield "training.layer_decay", "training.layer_decay", f"{training.layer_decay:g}"


def _by_adapter(adapter: AdapterConfig) -> Iterator[tuple[str, str, str]]:
    yield f"model.adapter.kind {adapter.kind}", "model.adapter.kind", adapter.kind
    if adapter.freezes:
        yield "adapters", "model.adapter.kind", adapter.kind
    if adapter.lightened:
        field, _, value = adapter.lightened.partition(" ")
        yield adapter.lightened, field, value


FEATURES: Final[Mapping[str, str]] = {
    "cpu": "`compute.device: cpu`, or any `compute.offload`, which updates weights on the CPU",
    "sharding": "a strategy that shards the optimizer's state",
    "one rank": "`compute.nproc_per_node: 1` on one node",
    "bf16": "`training.bf16`, or a plan that chooses it",
    "fp16": "`training.fp16`, or a plan that chooses it",
    "schedule": "a learning rate that changes after warm-up",
    "averaging": "`training.averaging`, or a component that replaces the exported weights",
    "adam_beta1 0": "`training.adam_beta1: 0`",
    "exporting component": "one of `training.components` that replaces the exported weights",
    "another order": "`training.order` other than seeded",
    "adapters": "`model.adapter.kind` other than none",
    "another framework": "`model.framework` other than pytorch",
    SMALLER_MICRO_BATCH: "the fallback that halves the micro-batch when memory runs out",
}
"""What several settings ask for, or one with a certain value. The name of a strategy is a feature
too."""
RULES: Final = (
    Rule("training.fp16", "training.bf16", "a step computes in one of the two"),
    *(
        Rule(f"training.{name}", "another framework", PYTORCH_ONLY)
        for name in TrainingConfig.all_objectives()
    ),
    Rule(
        "model.added_tokens",
        "adapters",
        "adapters freeze the embeddings, so that new tokens would never be learned",
    ),
    Rule("model.added_tokens", "another framework", "only pytorch gives the model such tokens"),
    Rule("training.lr_scaling", "another framework", PYTORCH_ONLY),
    Rule("training.attention", "another framework", PYTORCH_ONLY),
    Rule("recovery.min_sequence_length", "another framework", PYTORCH_ONLY),
    Rule(
        "recovery.min_sequence_length",
        "training.distillation.top_k",
        "the stored answers are those to complete sequences",
    ),
    *(
        Rule(f"training.attention flash_attention_{version}", "cpu", "its kernels need CUDA")
        for version in (2, 3)
    ),
    Rule("training.attention flex", "cpu", "PyTorch has no backward pass for it there"),
    Rule("data.parts", "another framework", "only pytorch trains a head for each part"),
    Rule("evaluation.landscape", "another framework", "only weights of pytorch can be moved"),
    *technique_rules(),
)


def all_rules() -> Iterator[Rule]:
    """Yield the whole table: of every installed optimizer and strategy, and `RULES`."""
    for name in plugins.names(plugins.OPTIMIZERS):
        yield from _of_optimizer(name)
    for name in plugins.names(plugins.STRATEGIES):
        yield from _of_strategy(name)
    yield from RULES


def conflicts(config: Combination) -> Iterator[tuple[Rule, RequestedFeature, RequestedFeature]]:
    """Yield each rule that a configuration breaks, with its two sides."""
    asked, strategy = requested_features(config), config.compute.strategy
    for rule in _rules_for(config, strategy):
        if rule.setting in asked and rule.feature in asked:
            yield rule, asked[rule.setting], asked[rule.feature]


def obstacles(config: Combination, feature: str) -> Iterator[tuple[str, str]]:
    """Yield the settings that keep a configuration from also using a feature, each with the reason.

    Args:
        feature: the name of a strategy, or a key of `FEATURES`.
    """
    strategy = feature if feature in plugins.names(plugins.STRATEGIES) else AUTO
    needed = {feature} if strategy == AUTO else strategy_features(strategy)
    asked = requested_features(config)
    for rule in _rules_for(config, strategy):
        if rule.setting == f"{STRATEGY} {strategy}" and rule.feature in asked:
            yield rule.feature, rule.why
        elif rule.setting in asked and rule.feature in needed:
            yield rule.setting, rule.why


def _rules_for(config: Combination, strategy: str) -> Iterator[Rule]:
    if strategy != AUTO:
        yield from _of_strategy(strategy)
    yield from RULES
    yield from _of_optimizer(config.training.optim)


def _of_optimizer(name: str) -> Iterator[Rule]:
    for feature, why in optimizer_spec(name).unsupported.items():
        yield Rule(f"{OPTIM} {name}", feature, why)


def _of_strategy(name: str) -> Iterator[Rule]:
    for setting, why in strategy_spec(name).unsupported.items():
        yield Rule(f"{STRATEGY} {name}", setting, why)
