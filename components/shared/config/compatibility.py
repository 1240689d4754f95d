"""Which settings cannot be combined, and why: the one table behind validation, fallbacks and docs.

A rule names a setting of a configuration and a feature that it does not support. Optimizers and
strategies, built in or of a package, have their rules in their specs; all others are in `RULES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.asked import (
    COMPRESSION,
    CUT,
    FROZEN,
    OPTIM,
    PAIR,
    STORED,
    STRATEGY,
    UNFREEZE_AT,
    Asked,
    Combination,
    asked_by,
)
from steadytrain.components.shared.config.curriculum import CUTS
from steadytrain.components.shared.config.objectives import OBJECTIVES
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.shared.config.strategies import AUTO, strategy_features, strategy_spec

SMALLER_MICRO_BATCH: Final = "smaller micro-batch"
"""What the OOM fallback of that name needs."""


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
            f"curriculum.by {CUTS}",
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
    Rule(
        "training.class_weights balanced",
        "training.order balanced",
        "both make up for rare classes",
    ),
    Rule("training.curriculum", "another order", "it is an order of its own"),
    *(
        Rule("training.multi_task.sampling", other, "it is an order of its own")
        for other in ("another order", "training.curriculum")
    ),
    Rule(
        "model.added_tokens",
        "adapters",
        "adapters freeze the embeddings, so that new tokens would never be learned",
    ),
    Rule("model.added_tokens", "another framework", "only pytorch gives the model such tokens"),
    Rule("training.augmentation", PAIR, "it changes single texts"),
    Rule("training.mixup", PAIR, "a mixture of two pairs has no first and second text"),
    Rule("data.parts", "another framework", "only pytorch trains a head for each part"),
    Rule("evaluation.landscape", "another framework", "only weights of pytorch can be moved"),
    *(
        Rule(f"training.{name}", "training.distillation", _REPLACES)
        for name in ("r_drop", "focal_loss", "class_weights", "mixup")
    ),
    Rule(STORED, "training.distillation.hidden", "hidden states are too large to store"),
    Rule(STORED, "training.adversarial", "the teacher answered the texts without perturbation"),
    Rule(STORED, "data.task denoising", "each epoch hides other tokens, which need other answers"),
    Rule(STORED, "training.augmentation", "the teacher answered the texts as they are"),
    Rule(STORED, CUT, "the teacher answered documents of full length"),
    Rule("training.contrastive", "training.r_drop", _TWICE),
    Rule("training.batch_contrastive", "training.r_drop", _TWICE),
    Rule("training.r_drop", "training.adversarial", "both passes would need the same perturbation"),
    Rule("training.batch_contrastive", "training.mixup", "a mixture of two texts has no one class"),
    Rule(
        "training.monitor.noise_scale",
        "training.mixup",
        "it needs independent micro-batches, and mixtures share texts",
    ),
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
