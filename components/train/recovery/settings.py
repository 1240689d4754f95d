"""Which parts of a run's configuration may change when the run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from steadytrain.components.shared import plugins
from steadytrain.components.shared.base_model import (
    base_content,
    grader_content,
    teacher_content,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.model import identifying_model
from steadytrain.components.shared.config.strategies import AUTO
from steadytrain.components.shared.config.training import WATCHING, identifying
from steadytrain.components.shared.digest import users_code_digest, value_digest
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.registry import task_code

NEUTRAL = (
    "micro_batch_size",
    "gradient_checkpointing",
    "torch_compile",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "save_total_limit",
    "save_keep_every",
    *WATCHING,
)
"""Fields of `training` that control how the work is split and what is reported. They don't affect
what the model learns."""

FREE_FIELDS = ("model.adapter.frozen_embeddings",)
"""Exceptions in sections that otherwise must not change: where frozen weights are kept."""

FREE_SECTIONS = ("compute", "recovery")
"""Every field of these may change: where to train, and what to do about failures."""

_REORDERING = {
    "training.micro_batch_size",
    "training.gradient_checkpointing",
    "training.torch_compile",
    "compute.strategy",
    "compute.offload",
    "compute.device",
    "compute.nodes",
    "compute.nproc_per_node",
    "compute.threads_per_rank",
}
_MEANING = {
    "data.fingerprint": " (the data differ, or another version of steadytrain prepared them)",
    "base.content": " (the files of model.base have changed)",
    "teacher.content": " (the files of training.distillation.teacher have changed)",
    "grader.content": " (the files of training.curriculum.model have changed)",
}
MAY_DIFFER = (
    f"{', '.join([*(f'training.{name}' for name in NEUTRAL), *FREE_FIELDS])}, and all of "
    f"{' and '.join(FREE_SECTIONS)}"
)


def inputs_digest(config: RunConfig, data: DataRecord) -> str:
    """Return a digest of everything that determines the final weights.

    For the base model, the teacher and a curriculum's model, the content counts, not the address.

    Raises:
        BadInput, StorageError: the content of one of them cannot be determined.
    """
    training = identifying(config.training.model_dump(mode="json", exclude=set(NEUTRAL)))
    model = identifying_model(
        config.model.model_dump(mode="json", exclude={"adapter": {"frozen_embeddings"}})
    )
    if config.model.base:
        model["base"] = base_content(config)
    if teacher := teacher_content(config):
        training["distillation"]["teacher"] = teacher
    if grader := grader_content(config):
        training["curriculum"]["model"] = grader
    code = plugin_code(config)
    return value_digest([data.fingerprint, model, training, *([code] if code else [])])


def plugin_code(config: RunConfig) -> dict[str, str]:
    """Return the version and the code of other packages that determine the weights, by field."""
    training = config.training
    found = _described(
        ("model.framework", plugins.TRAINERS, config.model.framework),
        ("training.order", plugins.ORDERS, training.order),
        ("training.optim", plugins.OPTIMIZERS, training.optim),
        ("training.lr_scheduler_type", plugins.SCHEDULES, training.lr_scheduler_type),
        *(
            (f"training.components.{name}", plugins.COMPONENTS, name)
            for name in training.components
        ),
    )
    task = task_code(config.data.task)
    return found | ({"data.task": f"{config.data.task}, code {task[:12]}"} if task else {})


def strategy_code(config: RunConfig) -> dict[str, str]:
    """Return the version and the code of another package's strategy.

    The field includes the name: a run may continue with another strategy, but not with other code
    of the same one.
    """
    name = config.compute.strategy
    return {} if name == AUTO else _described((f"strategy {name}", plugins.STRATEGIES, name))


def _described(*used: tuple[str, str, str]) -> dict[str, str]:
    """Return the version and the code of each plugin of another package, by field.

    Args:
        used: the field, the group and the name of each plugin.
    """
    found = {}
    for field, group, name in used:
        if not plugins.is_ours(group, name):
            point = plugins.find(group, name)
            found[field] = f"{plugins.described(point)}, code {users_code_digest(point.value)[:12]}"
    return found


def settings(config: RunConfig, data: DataRecord) -> dict[str, Any]:
    """Return the settings that a supervisor uses as plain data: sections and their fields."""
    found = {"data": {"fingerprint": data.fingerprint}, **stated(config)}
    if config.model.base:
        found["base"] = {"content": base_content(config)}
    if teacher := teacher_content(config):
        found["teacher"] = {"content": teacher}
    if grader := grader_content(config):
        found["grader"] = {"content": grader}
    return found | {"plugins": plugin_code(config) | strategy_code(config)}


def stated(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the configuration alone, without resolving addresses."""
    content = config.model_dump(mode="json", include={"model", "training", *FREE_SECTIONS})
    # Separate sections, so that a change is reported by field.
    within = {
        "model.adapter": content["model"].pop("adapter"),
        "model.dropout": content["model"].pop("dropout"),
        "training.averaging": content["training"].pop("averaging"),
        "training.curriculum": content["training"].pop("curriculum"),
        "compute.pods": content["compute"].pop("pods"),
    }
    return {**content, **within}


def refused(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the changes that prevent a resume: field, old value and new value."""
    changes = [(name, change) for name, change in _changes(before, now) if not _may_differ(name)]
    return [f"{name} {change}{_MEANING.get(name, '')}" for name, change in changes]


def other_strategy_code(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the run continues with the same strategy, but with other code of it."""
    changed = (name for name, _ in _changes(before, now))
    return any(name.startswith("plugins.strategy ") for name in changed)


def accepted(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the allowed changes; "" if there are none."""
    changes = {name: change for name, change in _changes(before, now) if _may_differ(name)}
    if not changes:
        return ""
    said = f"continues with changed settings: {', '.join(map(' '.join, changes.items()))}"
    if changes.keys() & _REORDERING:
        said += "; sums are computed in another order, so the weights agree, but not bit for bit"
    return said


def _may_differ(name: str) -> bool:
    section, _, field = name.partition(".")
    neutral = name in FREE_FIELDS or (section == "training" and field.partition(".")[0] in NEUTRAL)
    return section in FREE_SECTIONS or neutral


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields that exist on both sides with different values."""
    for section in (name for name in now if name in before):
        for name in (name for name in now[section] if name in before[section]):
            old, new = before[section][name], now[section][name]
            if old != new:
                yield f"{section}.{name}", f"{old!r} -> {new!r}"


def effect(name: str) -> str:
    """Describe for people what a change of a field of the model, training or compute does."""
    if not _may_differ(name):
        return "what the model learns. A run cannot continue with another value"
    if name in _REORDERING:
        return (
            "how training is done. A run may continue with another value; its weights then agree, "
            "but not to the bit"
        )
    return "how training is done, not what it learns. A run may continue with another value"
