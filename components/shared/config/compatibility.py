"""Which settings cannot be combined, and why: the one table behind validation, fallbacks and docs.

A rule names a setting of a configuration and a feature that it does not support. Optimizers and
strategies, built in or of a package, have their rules in their specs, techniques in the settings in
their folder (`components/techniques`). All others are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.asked import OPTIM, STRATEGY, Asked, Combination, asked_by
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.shared.config.strategies import AUTO, strategy_features, strategy_spec
from steadytrain.components.shared.config.training import TrainingConfig
from steadytrain.components.techniques.settings import (
    PYTORCH_ONLY,
    SMALLER_MICRO_BATCH,
    Rule,
    technique_rules,
)

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
    Rule("model.adapter.kind qlora", "cpu", "its kernels need a CUDA device"),
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
