"""The compatibility table: every rule rejects the configuration that it is about."""

from __future__ import annotations

import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.compatibility import (
    FEATURES,
    RULES,
    SMALLER_MICRO_BATCH,
    all_rules,
)
from steadytrain.components.shared.errors import ConfigError

MINIMAL = {
    "name": "tiny",
    "data": {"source": ["x"]},
    "model": {"base": "hub:x"},
    # The default schedule would break rules too.
    "training": {"lr_scheduler_type": "constant"},
}
CONTENT = {
    "training.fp16": {"training": {"fp16": True}},
    "training.bf16": {"training": {"bf16": True}},
    "fp16": {"training": {"fp16": True}},
    "bf16": {"training": {"bf16": True}},
    "training.torch_compile": {"training": {"torch_compile": True}},
    "training.monitor.layers": {"training": {"monitor": {"layers": True}}},
    "training.monitor.histograms": {"training": {"monitor": {"histograms": True}}},
    "training.monitor.noise_scale": {"training": {"monitor": {"noise_scale": True}}},
    "training.averaging": {"training": {"averaging": {"kind": "ema"}}},
    "averaging": {"training": {"averaging": {"kind": "ema"}}},
    "schedule": {"training": {"lr_scheduler_type": "linear"}},
    "adam_beta1 0": {"training": {"adam_beta1": 0}},
    "training.distillation": {"training": {"distillation": {"teacher": "x"}}},
    "training.distillation.top_k": {"training": {"distillation": {"teacher": "x", "top_k": 4}}},
    "training.distillation.hidden": {
        "training": {"distillation": {"teacher": "x", "hidden": {"weight": 1}}}
    },
    "data.task denoising": {"data": {"task": "denoising"}},
    "training.contrastive": {"training": {"contrastive": {"weight": 1}}},
    "training.batch_contrastive": {"training": {"batch_contrastive": {"rows": 4}}},
    "training.dpo": {"training": {"dpo": {"beta": 0.5}}},
    "training.kto": {"training": {"kto": {"beta": 0.5}}},
    "training.masking": {"training": {"masking": {"probability": 0.3}}},
    "training.denoising": {"training": {"denoising": {"noise_density": 0.3}}},
    "training.r_drop": {"training": {"r_drop": {"weight": 1}}},
    "training.focal_loss": {"training": {"focal_loss": {"gamma": 2}}},
    "training.class_weights": {
        "training": {"class_weights": {"kind": "given", "given": {"a": 1.0}}}
    },
    "training.class_weights balanced": {"training": {"class_weights": {"kind": "balanced"}}},
    "training.adversarial": {"training": {"adversarial": {"kind": "fgm"}}},
    "training.mixup": {"training": {"mixup": {"alpha": 0.4}}},
    "training.augmentation": {"training": {"augmentation": {"swap": 0.1}}},
    "training.image_augmentation": {"training": {"image_augmentation": {"shift": 0.1}}},
    "training.curriculum": {"training": {"curriculum": {"by": "length"}}},
    "training.curriculum.by sequence_length": {
        "training": {"curriculum": {"by": "sequence_length"}}
    },
    "training.multi_task.sampling": {"training": {"multi_task": {"sampling": "temperature"}}},
    "training.mixture": {
        "data": {"parts": {name: {"source": [name]} for name in "ab"}},
        "training": {"mixture": {"by": "temperature"}},
    },
    "training.multi_task": {"training": {"multi_task": {"sampling": "temperature"}}},
    "data.columns.text_pair": {
        "data": {
            "task": "sequence_classification",
            "source": ["a"],
            "columns": {"text_pair": "hypothesis"},
        }
    },
    "data.parts": {
        "data": {
            "task": "multi_task",
            "source": ["a", "b"],
            "parts": {"first": {"source": ["a"]}, "second": {"source": ["b"]}},
        },
        "gate": {"max_slice_regression": 0.02},
    },
    "evaluation.landscape": {"evaluation": {"landscape": {"points": 3}}},
    "training.order balanced": {"training": {"order": "balanced"}},
    "another order": {"training": {"order": "balanced"}},
    "training.layer_decay": {"training": {"layer_decay": 0.9}},
    "training.attention": {"training": {"attention": "eager"}},
    "training.attention flex": {"training": {"attention": "flex"}},
    **{
        f"training.attention flash_attention_{version}": {
            "training": {"attention": f"flash_attention_{version}"}
        }
        for version in (2, 3)
    },
    "training.lr_scaling": {
        "training": {"lr_scaling": "sqrt", "base_global_batch_size": 8, "global_batch_size": 32}
    },
    "training.param_groups": {"training": {"param_groups": [{"match": "a"}]}},
    "training.param_groups frozen": {
        "training": {"param_groups": [{"match": "a", "frozen": True}]}
    },
    "training.param_groups unfreeze_at": {
        "training": {"param_groups": [{"match": "a", "unfreeze_at": 0.5}]}
    },
    "training.gradient_compression": {
        "training": {"gradient_compression": {"kind": "bf16"}},
        "compute": {"nproc_per_node": 2},
    },
    "model.adapter.kind qlora": {"model": {"adapter": {"kind": "qlora"}}},
    "model.adapter.frozen_head 8bit": {
        "model": {"adapter": {"kind": "lora", "frozen_head": "8bit"}}
    },
    "model.adapter.frozen_head 4bit": {
        "model": {"adapter": {"kind": "lora", "frozen_head": "4bit"}}
    },
    "model.adapter.frozen_embeddings host": {
        "model": {"adapter": {"kind": "lora", "frozen_embeddings": "host"}}
    },
    "model.added_tokens": {"model": {"added_tokens": ["<a>"]}},
    "adapters": {"model": {"adapter": {"kind": "lora"}}},
    "cpu": {"compute": {"device": "cpu"}},
    "sharding": {"compute": {"strategy": "fsdp"}},
    "one rank": {"compute": {"nproc_per_node": 1}},
    "recovery.min_sequence_length": {"recovery": {"min_sequence_length": 64}},
    "recovery.min_nodes": {
        "recovery": {"min_nodes": 1},
        "compute": {"nodes": 2},
    },
}
"""A configuration that asks for each setting and feature. Those of packages are missing."""


def content_of(name):
    field, _, value = name.partition(" ")
    if field in ("training.optim", "compute.strategy"):
        section, _, key = field.partition(".")
        return {section: {key: value}}
    if name in plugins.names(plugins.STRATEGIES):
        return {"compute": {"strategy": name}}
    return CONTENT[name]


def merged(*parts):
    found = MINIMAL
    for part in parts:
        found = both_of(found, part)
    return found


def both_of(one, other):
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return one | {key: both_of(one.get(key), value) for key, value in other.items()}


PACKAGES = {"another framework", "exporting component"}
"""Features that only installed packages ask for."""


@pytest.mark.parametrize(
    "rule",
    [rule for rule in all_rules() if rule.feature not in {*PACKAGES, SMALLER_MICRO_BATCH}],
    ids=lambda rule: f"{rule.setting} and {rule.feature}",
)
def test_rule_rejects_its_combination(rule):
    both = merged(content_of(rule.setting), content_of(rule.feature))
    with pytest.raises(ConfigError) as caught:
        from_mapping(both)
    assert f"{rule.why}, and " in str(caught.value)


def test_each_side_of_a_rule_is_something_that_a_configuration_can_ask_for():
    known = {*CONTENT, *FEATURES, *plugins.names(plugins.STRATEGIES)}
    for rule in RULES:
        assert {rule.setting, rule.feature} <= known, rule
