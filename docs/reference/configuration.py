"""Every field of the configuration and of schedule files, from the pydantic models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from pydantic import BaseModel
from reference.markdown import code, table

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import (
    REQUIRED,
    Field,
    effect_of,
    leaves,
    section_of,
    summary_of,
)
from steadytrain.pipelines.server.schedule_file import ScheduleFile

_HEADS = ("Field", "Type", "Default", "Unit", "Meaning")


def page() -> str:
    """The configuration, one table for each section."""
    intro = (
        "# Configuration\n\n"
        "A configuration is a YAML file. `steadytrain validate FILE` checks it, "
        "`steadytrain validate FILE --show` prints it with all defaults, and "
        "`steadytrain schema` prints this page as JSON Schema. Override a field on the command "
        "line with `--set section.field=value`. Unknown fields are errors. The last column says "
        "what a change affects; `steadytrain validate --explain FIELD` says what it means for a "
        "run that has begun.\n"
    )
    return "\n".join([intro, *_sections(RunConfig, _with_effect, heads=(*_HEADS, "Affects"))])


def schedules_page() -> str:
    """The files that `steadytrain schedule apply` takes."""
    intro = (
        "# Schedule files\n\n"
        "`steadytrain schedule apply FILE` takes a YAML file with these fields. The "
        "[guide](../guides/schedules.md) has an example.\n"
    )
    return "\n".join([intro, *_sections(ScheduleFile, _row, heads=_HEADS)])


def _sections(
    model: type[BaseModel],
    row: Callable[[Field], tuple[str, ...]],
    prefix: str = "",
    *,
    heads: tuple[str, ...],
) -> Iterator[str]:
    """The model's own fields, then each section, depth first, in the order of the code."""
    own = [field for field in leaves(model, prefix) if "." not in field.name[len(prefix) :]]
    if own:
        yield table(heads, map(row, own))
    for name, found in model.model_fields.items():
        inner = section_of(found.annotation)
        if inner:
            yield f"## {prefix}{name}\n"
            yield f"{summary_of(inner)}\n"
            yield from _sections(inner, row, f"{prefix}{name}.", heads=heads)


def _row(field: Field) -> tuple[str, ...]:
    default = "required" if field.default is REQUIRED else code(json.dumps(field.default))
    meaning = f"{field.description} ({field.limits})" if field.limits else field.description
    return code(field.name), code(field.kind), default, field.unit, meaning


def _with_effect(field: Field) -> tuple[str, ...]:
    return *_row(field), effect_of(field.name).label
