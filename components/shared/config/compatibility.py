"""Which settings cannot be combined, and why: the one table behind validation, fallbacks and docs.

A rule names a setting of a configuration and a feature that it does not support. Optimizers and
strategies, built in or of a package, have their rules in their specs; all others are in `RULES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.compute import ComputeConfig
from steadytrain.components.shared.config.model import AdapterConfig, ModelConfig
from steadytrain.components.shared.config.objectives import OBJECTIVES
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.shared.config.recovery import RecoveryConfig
from steadytrain.components.shared.config.schedules import schedule_spec
from steadytrain.components.shared.config.strategies import AUTO, strategy_features, strategy_spec
from steadytrain.components.shared.config.training import TrainingConfig

SMALLER_MICRO_BATCH: Final = "smaller micro-batch"
"""What the OOM fallback of that name needs."""
FROZEN: Final = "training.param_groups frozen"
UNFREEZE_AT: Final = "training.param_groups unfreeze_at"
COMPRESSION: Final = "training.gradient_compression"
_OPTIM: Final = "training.optim"
_STRATEGY: Final = "compute.strategy"


class Combination(Protocol):
    """The sections of a RunConfig that rules are about."""

    @property
    def compute(self) -> ComputeConfig: ...

    @property
    def model(self) -> ModelConfig: ...

    @property
    def recovery(self) -> RecoveryConfig: ...

    @property
    def training(self) -> TrainingConfig: ...


@dataclass(frozen=True)
class Rule:
    """A setting that does not support a feature.

    setting: a field, followed by its value unless that is true: "training.fp16",
        "training.optim lamb".
    feature: another such setting, or one of the names in `FEATURES`.
    """

    setting: str
    feature: str
    why: str


@dataclass(frozen=True)
class Asked:
    """The field and the value that ask for a feature."""

    field: str
    value: str


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
    "adapters": "`model.adapter.kind` other than none",
    "another framework": "`model.framework` other than pytorch",
    SMALLER_MICRO_BATCH: "the fallback that halves the micro-batch when memory runs out",
}
"""What several settings ask for, or one with a certain value. The name of a strategy is a feature
too."""
_REPLACES: Final = "with a teacher, the loss on the targets is plain cross-entropy"
_TWICE: Final = "it compares the rows of one pass, and R-Drop has two"
RULES: Final = (
    Rule("training.fp16", "training.bf16", "a step computes in one of the two"),
    Rule("model.adapter.kind qlora", "cpu", "its kernels need a CUDA device"),
    *(
        Rule(f"training.{name}", "another framework", "only the loop of pytorch reads it")
        for name in (
            *OBJECTIVES,
            "param_groups",
            "layer_decay",
            "gradient_compression",
            "curriculum",
        )
    ),
    Rule(
        "training.batch_contrastive", SMALLER_MICRO_BATCH, "it compares the rows of a micro-batch"
    ),
    Rule(
        "training.batch_contrastive",
        "recovery.min_nodes",
        "it compares the rows of a micro-batch, which may change on fewer nodes",
    ),
    *(
        Rule(f"training.{name}", "training.distillation", _REPLACES)
        for name in ("r_drop", "focal_loss", "class_weights")
    ),
    Rule("training.contrastive", "training.r_drop", _TWICE),
    Rule("training.batch_contrastive", "training.r_drop", _TWICE),
    Rule("training.r_drop", "training.adversarial", "both passes would need the same perturbation"),
    Rule("training.averaging", "exporting component", "both replace the exported weights"),
    *(
        Rule(setting, "adapters", "adapters freeze the model's own weights, and only they learn")
        for setting in (FROZEN, UNFREEZE_AT)
    ),
    Rule(COMPRESSION, "sharding", "only DDP exchanges gradients through a hook that compresses"),
    Rule(COMPRESSION, "one rank", "one rank exchanges no gradients"),
    Rule(COMPRESSION, "fp16", "an overflow would stay in the gradients that it carries over"),
    Rule(UNFREEZE_AT, "sharding", "sharding decides at the start which weights have gradients"),
)


def all_rules() -> Iterator[Rule]:
    """Yield the whole table: of every installed optimizer and strategy, and `RULES`."""
    for name in plugins.names(plugins.OPTIMIZERS):
        yield from _of_optimizer(name)
    for name in plugins.names(plugins.STRATEGIES):
        yield from _of_strategy(name)
    yield from RULES


def conflicts(config: Combination) -> Iterator[tuple[Rule, Asked, Asked]]:
    """Yield each rule that a configuration breaks, with its two sides."""
    asked, strategy = asked_by(config), config.compute.strategy
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
    asked = asked_by(config)
    for rule in _rules_for(config, strategy):
        if rule.setting == f"{_STRATEGY} {strategy}" and rule.feature in asked:
            yield rule.feature, rule.why
        elif rule.setting in asked and rule.feature in needed:
            yield rule.setting, rule.why


def asked_by(config: Combination) -> dict[str, Asked]:
    """Return the settings and features that a configuration asks for, by name."""
    found: dict[str, Asked] = {}
    for name, field, value in _asked(config):
        found.setdefault(name, Asked(field, value))
    return found


def _rules_for(config: Combination, strategy: str) -> Iterator[Rule]:
    if strategy != AUTO:
        yield from _of_strategy(strategy)
    yield from RULES
    yield from _of_optimizer(config.training.optim)


def _of_optimizer(name: str) -> Iterator[Rule]:
    for feature, why in optimizer_spec(name).unsupported.items():
        yield Rule(f"{_OPTIM} {name}", feature, why)


def _of_strategy(name: str) -> Iterator[Rule]:
    for setting, why in strategy_spec(name).unsupported.items():
        yield Rule(f"{_STRATEGY} {name}", setting, why)


def _asked(config: Combination) -> Iterator[tuple[str, str, str]]:
    """Yield (name, field, value)."""
    yield from _by_compute(config.compute)
    yield from _by_training(config.training)
    yield from _by_groups(config.training)
    yield from _by_adapter(config.model.adapter)
    if config.model.framework != "pytorch":
        yield "another framework", "model.framework", config.model.framework
    if config.recovery.min_nodes is not None:
        yield "recovery.min_nodes", "recovery.min_nodes", str(config.recovery.min_nodes)


def _by_compute(compute: ComputeConfig) -> Iterator[tuple[str, str, str]]:
    if compute.device == "cpu":
        yield "cpu", "compute.device", "cpu"
    if compute.strategy != AUTO:
        for name in (f"{_STRATEGY} {compute.strategy}", *strategy_features(compute.strategy)):
            yield name, _STRATEGY, compute.strategy
    if compute.world_size == 1:
        yield "one rank", "compute.nproc_per_node", "1"
    if compute.offload != "none":
        yield "cpu", "compute.offload", compute.offload


def _by_training(training: TrainingConfig) -> Iterator[tuple[str, str, str]]:
    yield f"{_OPTIM} {training.optim}", _OPTIM, training.optim
    for precision in ("bf16", "fp16"):
        if getattr(training, precision):
            yield precision, f"training.{precision}", "true"
    switches = {
        "training.bf16": training.bf16,
        "training.fp16": training.fp16,
        "training.torch_compile": training.torch_compile,
        "training.monitor.layers": training.monitor.layers,
        "training.monitor.noise_scale": training.monitor.noise_scale,
    }
    yield from ((field, field, "true") for field, on in switches.items() if on)
    schedule = training.lr_scheduler_type
    if schedule_spec(schedule).changes:
        yield "schedule", "training.lr_scheduler_type", schedule
    for name in training.exporting_components:
        yield "exporting component", "training.components", name
        yield "averaging", "training.components", name
    if training.averaging.on:
        for name in ("averaging", "training.averaging"):
            yield name, "training.averaging.kind", training.averaging.kind
    if training.adam_beta1 == 0:
        yield "adam_beta1 0", "training.adam_beta1", "0"
    if training.gradient_compression.on:
        yield COMPRESSION, f"{COMPRESSION}.kind", training.gradient_compression.kind
    if training.order != "seeded":
        yield "another order", "training.order", training.order
    if training.curriculum.on:
        yield "training.curriculum", "training.curriculum.by", training.curriculum.by
    for name in training.objectives:
        yield f"training.{name}", f"training.{name}", "on"


def _by_groups(training: TrainingConfig) -> Iterator[tuple[str, str, str]]:
    for place, group in enumerate(training.param_groups):
        field = f"training.param_groups.{place}"
        yield "training.param_groups", field, group.match
        if group.frozen:
            yield FROZEN, f"{field}.frozen", "true"
        if group.unfreeze_at is not None:
            yield UNFREEZE_AT, f"{field}.unfreeze_at", f"{group.unfreeze_at:g}"
    if training.layer_decay is not None:
        yield "training.layer_decay", "training.layer_decay", f"{training.layer_decay:g}"


def _by_adapter(adapter: AdapterConfig) -> Iterator[tuple[str, str, str]]:
    yield f"model.adapter.kind {adapter.kind}", "model.adapter.kind", adapter.kind
    if adapter.freezes:
        yield "adapters", "model.adapter.kind", adapter.kind
    if adapter.lightened:
        field, _, value = adapter.lightened.partition(" ")
        yield adapter.lightened, field, value
