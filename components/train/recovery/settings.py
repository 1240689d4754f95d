"""What of a run's configuration may change when it is continued, and what may not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from steadytrain.components.shared.base_model import base_content
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.records import DataRecord

NEUTRAL = (
    "micro_batch_size",
    "gradient_checkpointing",
    "torch_compile",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "save_total_limit",
    "save_keep_every",
)
"""Fields of `training` that say how the work is cut and what is told of it; none of them decides
what is learned."""

FREE_SECTIONS = ("compute", "recovery")
"""All of these may change: where it is trained, and what happens when something breaks."""

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
    "data.fingerprint": " (other data, or prepared by another version of steadytrain)",
    "base.content": " (the files that model.base stands for have changed)",
}
MAY_DIFFER = (
    f"{', '.join(f'training.{name}' for name in NEUTRAL)}, and all of {' and '.join(FREE_SECTIONS)}"
)


def inputs_digest(config: RunConfig, data: DataRecord) -> str:
    """Digest of all that decides the weights that training ends with.

    Of the base model it is the content that counts, not the address.

    Raises:
        BadInput, StorageError: the base model cannot be asked what it is.
    """
    training = config.training.model_dump(mode="json", exclude=set(NEUTRAL))
    model = config.model.model_dump(mode="json")
    if config.model.base:
        model["base"] = base_content(config)
    return value_digest([data.fingerprint, model, training])


def settings(config: RunConfig, data: DataRecord) -> dict[str, Any]:
    """What a supervisor works by, as plain data: sections and their fields."""
    content = config.model_dump(mode="json", include={"model", "training", *FREE_SECTIONS})
    # Sections of their own, so that a change is told by its field.
    within = {
        "model.adapter": content["model"].pop("adapter"),
        "compute.pods": content["compute"].pop("pods"),
    }
    if config.model.base:
        within["base"] = {"content": base_content(config)}
    return {"data": {"fingerprint": data.fingerprint}, **content, **within}


def refused(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Changes with which a run cannot be continued: field, value then and value now."""
    changes = [(name, told) for name, told in _changes(before, now) if not _may_differ(name)]
    return [f"{name} {told}{_MEANING.get(name, '')}" for name, told in changes]


def accepted(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What has changed and may, in words; "" where nothing has."""
    changes = {name: told for name, told in _changes(before, now) if _may_differ(name)}
    if not changes:
        return ""
    said = f"goes on with other settings than before: {', '.join(map(' '.join, changes.items()))}"
    if changes.keys() & _REORDERING:
        said += "; sums are added up in another order, so that weights agree, but not to the bit"
    return said


def _may_differ(name: str) -> bool:
    section, _, field = name.partition(".")
    return section in FREE_SECTIONS or (section == "training" and field in NEUTRAL)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields that both know, and tell differently."""
    for section in (name for name in now if name in before):
        for name in (name for name in now[section] if name in before[section]):
            old, new = before[section][name], now[section][name]
            if old != new:
                yield f"{section}.{name}", f"{old!r} -> {new!r}"
