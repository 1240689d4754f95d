"""Fields of a search space that a trial would not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steadytrain.components.shared.config.asked import OPTIM
from steadytrain.components.shared.config.optimizers import unread_settings
from steadytrain.components.shared.config.plain import shown
from steadytrain.components.shared.config.run import RunConfig
from steadytrain.components.shared.config.schedules import schedule_spec
from steadytrain.components.shared.config.tune import Dimension

Found = tuple[str, str, str]
"""The part of the dimension, what is wrong, and the fix."""


def no_effect(config: RunConfig, field: str) -> Found | None:
    """Return why no trial, or not each one, reads a field that varies; None if nothing says so."""
    space = config.tune.space
    kind = "model.adapter.kind"
    of_adapters = field.startswith("model.adapter.") and field != kind
    if of_adapters and kind not in space and not config.model.adapter.freezes:
        return (
            "",
            f"it has no effect: {kind} is none",
            f"set {kind} to lora, or remove the field from the space",
        )
    if found := _unread_choices(space, field):
        unread, read = found
        return (
            "",
            f"{OPTIM} {unread[0]} does not read it",
            f"add when: {{{OPTIM}: {shown(read)}}}" if read else "remove the field from the space",
        )
    shape = "training.lr_scheduler_type"
    if field == "training.warmup_steps" and shape not in space:
        kind = config.training.lr_scheduler_type
        if not schedule_spec(kind).warms_up:
            return (
                "",
                f"it has no effect: {shape} {kind} has no warm-up",
                f"choose another {shape}, or remove the field from the space",
            )
    return None


def _unread_choices(
    space: Mapping[str, Dimension], field: str
) -> tuple[Sequence[str], Sequence[str]] | None:
    """Return the optimizers of a space that do not read a field that it varies, and those that do.

    None if each one reads it, or the field varies only under other conditions.
    """
    dimension, optim = space[field], space.get(OPTIM)
    if optim is None or optim.choices is None or (dimension.when and OPTIM not in dimension.when):
        return None
    name = field.removeprefix("training.")
    unread = [choice for choice in optim.choices if name in unread_settings(choice)]
    met = [item for item in unread if not dimension.when or dimension.allows(OPTIM, item)]
    return (met, [item for item in optim.choices if item not in unread]) if met else None
