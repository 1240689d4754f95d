"""Every field of the configuration and of schedule files, from the pydantic models."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from reference.markdown import code, table

from steadytrain.components.shared.config import RunConfig
from steadytrain.pipelines.server.declared import ScheduleFile

_HEADS = ("Field", "Type", "Default", "Unit", "Meaning")
_UNITS = {
    "_seconds": "seconds",
    "seconds_between_failures": "seconds",
    "_bytes": "bytes",
    "_share": "share, 0 to 1",
    "price_per_hour": "USD per hour",
    "sequence_length": "tokens",
    "vocab_size": "tokens",
    "batch_size": "sequences",
    "_epochs": "epochs",
    "max_steps": "optimizer steps",
    "logging_steps": "optimizer steps",
    "eval_steps": "optimizer steps",
    "save_steps": "optimizer steps",
    "save_keep_every": "optimizer steps",
    "spike_window": "optimizer steps",
    "warmup_steps": "optimizer steps, or a share below 1",
    "early_stopping_patience": "validations",
    "save_total_limit": "checkpoints",
    "pods.memory": "Kubernetes quantity",
    "shared_memory": "Kubernetes quantity",
    "temporary_storage": "Kubernetes quantity",
    "pods.cpu": "cores",
    "threads_per_rank": "threads",
    "compute.nodes": "nodes",
    "min_nodes": "nodes",
    "nproc_per_node": "ranks",
    "pods.gpus": "GPUs",
    "_examples": "examples",
    "bootstrap_samples": "resamples",
    "spike_threshold": "deviations",
    "recovery.resubmit": "submissions",
    "max_preemptions": "preemptions",
    "max_failures_per_class": "failures",
    "breaker_failures": "failures",
    "max_concurrency": "runs",
}
"""By the end of a field's full name; ratios and seeds have no unit."""


def page() -> str:
    """The configuration, one table for each section."""
    intro = (
        "# Configuration\n\n"
        "A configuration is a YAML file. `steadytrain validate FILE` checks it, "
        "`steadytrain validate FILE --show` prints it with all defaults, and "
        "`steadytrain schema` prints this page as JSON Schema. Override a field on the command "
        "line with `--set section.field=value`. Unknown fields are errors.\n"
    )
    return "\n".join([intro, *_sections(RunConfig)])


def schedules_page() -> str:
    """The files that `steadytrain schedule apply` takes."""
    intro = (
        "# Schedule files\n\n"
        "`steadytrain schedule apply FILE` takes a YAML file with these fields. The "
        "[guide](../guides/schedules.md) has an example.\n"
    )
    return "\n".join([intro, *_sections(ScheduleFile)])


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Full name and field of each leaf, sections opened."""
    for name, field in model.model_fields.items():
        inner = _section(field.annotation)
        if inner:
            yield from fields(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def unit(name: str) -> str:
    """Unit of a field by its full name; "" where it has none."""
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


def _sections(model: type[BaseModel]) -> Iterator[str]:
    """The model's own fields, then each section, depth first, in the order of the code."""
    yield from _section_table(model, "")
    yield from _inner_sections(model, "")


def _inner_sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = _section(field.annotation)
        if inner:
            full = f"{prefix}{name}"
            yield f"## {full}\n"
            yield f"{_summary(inner)}\n"
            yield from _section_table(inner, f"{full}.")
            yield from _inner_sections(inner, f"{full}.")


def _section_table(model: type[BaseModel], prefix: str) -> Iterator[str]:
    rows = [
        (
            code(f"{prefix}{name}"),
            code(_kind(field)),
            _default(field),
            unit(f"{prefix}{name}"),
            _meaning(field),
        )
        for name, field in model.model_fields.items()
        if not _section(field.annotation)
    ]
    if rows:
        yield table(_HEADS, rows)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, alone or in a list."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            # Volumes and the like are values; a section has a default or is required.
            return None if typing.get_origin(annotation) is types.UnionType else kind
    return None


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").split("\n\n")[0]


def _kind(field: FieldInfo) -> str:
    return _named(field.annotation)


def _named(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(item) for item in arguments)
    if origin is typing.Annotated:
        return _named(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return " | ".join(_named(item) for item in arguments)
    if origin:
        return f"{origin.__name__}[{', '.join(_named(item) for item in arguments)}]"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else ""
    return code(json.dumps(field.default))


def _meaning(field: FieldInfo) -> str:
    text = field.description or ""
    limits = [
        f"{sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(item, name, None) is not None
    ]
    return f"{text} ({', '.join(limits)})" if limits else text
