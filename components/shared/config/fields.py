"""Describe the fields of a configuration for people: type, default, unit, limits and meaning.

A `Decision` is a choice that the user could have made: a field, its value, and the reason.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from steadytrain.components.shared.config.document import shown
from steadytrain.components.shared.config.run import RunConfig
from steadytrain.components.shared.effects import Adjustable, Effect, effect_stated
from steadytrain.components.shared.errors import BadInput

_UNITS = {
    "_seconds": "seconds",
    "seconds_between_failures": "seconds",
    "_bytes": "bytes",
    "_share": "share, 0 to 1",
    "price_per_hour": "USD per hour",
    "budget_usd": "USD",
    "prometheus_port": "TCP port",
    "sequence_length": "tokens",
    "vocab_size": "tokens",
    "batch_size": "sequences",
    "batch_contrastive.rows": "sequences",
    "distillation.top_k": "tokens or labels",
    "noise_density": "share, 0 to 1",
    "mean_noise_span_length": "tokens",
    "dropout.hidden": "share, 0 to 1",
    "dropout.attention": "share, 0 to 1",
    "dropout.classifier": "share, 0 to 1",
    "character_noise": "share, 0 to 1",
    "min_units": "examples",
    "landscape.points": "points",
    "landscape.records": "records",
    "images.size": "pixels",
    "images.max_pixels": "pixels",
    "image_augmentation.shift": "share of the size",
    "image_augmentation.zoom": "share of the size",
    "image_augmentation.rotation": "degrees",
    "image_augmentation.brightness": "share, 0 to 1",
    "image_augmentation.contrast": "share, 0 to 1",
    "image_augmentation.erase": "share, 0 to 1",
    "image_augmentation.crop": "share of the area",
    "image_augmentation.rand_operations": "operations",
    "image_augmentation.rand_magnitude": "0 to 30",
    "augmentation.deletion": "share, 0 to 1",
    "augmentation.swap": "share, 0 to 1",
    "adversarial.steps": "steps of the search",
    "attack.steps": "steps of the search",
    "_epochs": "epochs",
    "max_steps": "optimizer steps",
    "logging_steps": "optimizer steps",
    "eval_steps": "optimizer steps",
    "save_steps": "optimizer steps",
    "every_steps": "optimizer steps",
    "profile.steps": "optimizer steps",
    "save_keep_every": "optimizer steps",
    "prefetch_batches": "global batches",
    "loader_workers": "threads",
    "spike_window": "optimizer steps",
    "warmup_steps": "optimizer steps, or a share below 1",
    "averaging.start": "optimizer steps, or a share below 1",
    "unfreeze_at": "optimizer steps, or a share below 1",
    "gradient_compression.start": "optimizer steps",
    "averaging.every": "optimizer steps",
    "early_stopping_patience": "validations",
    "save_total_limit": "checkpoints",
    "pods.memory": "Kubernetes quantity",
    "shared_memory": "Kubernetes quantity",
    "temporary_storage": "Kubernetes quantity",
    "pods.cpu": "cores",
    "threads_per_rank": "threads",
    "horizon": "times",
    "season": "times",
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
    "budget.trials": "trials",
    "budget.units": "units",
    "budget.steps": "optimizer steps",
    "budget.tokens": "tokens",
    "budget.hours": "hours",
    "budget.usd": "USD",
    "budget.unit_minutes": "minutes",
    "budget.parallel": "trials",
    "tune.min_steps": "optimizer steps",
    "tune.min_tokens": "tokens",
    "tune.seeds": "seeds",
    "ablation.seeds": "seeds",
    "cross_validation.folds": "folds",
    "cross_validation.repeats": "divisions",
    "automl.repeats": "divisions",
    "curriculum.over": "optimizer steps, or a share up to 1",
    "curriculum.start": "share of the records",
    "constraints.parameters": "parameters",
    "constraints.memory_gb": "GB",
    "constraints.latency_ms": "milliseconds",
    "constraints.model_mb": "MB",
    "gate.compared": "configurations",
    "gate.promised": "nats, or the square of the target's unit",
    "model.fusion.width": "values",
}
"""By the end of a field's full name. Ratios and seeds have no unit."""
_LIMITS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
REQUIRED = PydanticUndefined
"""The default of a field that has none."""


@dataclass(frozen=True)
class Field:
    """A field, or a section.

    name: full name, such as training.max_steps.
    kind: type, or the allowed values; "" for a section.
    default: the plain value; REQUIRED if there is none.
    unit: "" if it has none.
    limits: bounds of a number, such as "≥ 1"; "" if it has none.
    inner: names of a section's own fields, in the order of the code.
    """

    name: str
    kind: str
    default: Any
    unit: str
    limits: str
    description: str
    inner: tuple[str, ...] = ()


def describe(name: str) -> Field:
    """Return the description of a field or section of the configuration by its full name.

    Raises:
        BadInput: there is no such field. The message names the closest one.
    """
    path = list(_path(name))
    if len(path) < len(name.split(".")):
        raise _unknown(name)
    result = path[-1]
    section = section_of(result.annotation)
    if section is None:
        return _leaf(name, result)
    summary, inner = summary_of(section), tuple(section.model_fields)
    return Field(name, "", result.get_default(), "", "", summary, inner)


def effect_of(name: str) -> Effect:
    """Return what a field or section affects, by its full name.

    A part of a value, such as an entry of model.config, has the effect of the value.

    Raises:
        BadInput: there is no such field.
    """
    effect = None
    for field in _path(name):
        effect = effect_stated(field, effect)
    if effect is None:
        raise _unknown(name)
    return effect


def is_adjustable(name: str) -> bool:
    """Return whether a person can change a field, by its full name, while a run trains."""
    *_, result = _path(name)
    return any(isinstance(item, Adjustable) for item in result.metadata)


def is_section(name: str) -> bool:
    """Return whether a full name is that of a section."""
    path = list(_path(name))
    return len(path) == name.count(".") + 1 and section_of(path[-1].annotation) is not None


def _path(name: str) -> Iterator[FieldInfo]:
    """Yield the sections that lead to a field, and the field, as far as they exist."""
    section: type[BaseModel] | None = RunConfig
    for part in name.split("."):
        if section is None or part not in section.model_fields:
            return
        field = section.model_fields[part]
        yield field
        section = section_of(field.annotation)


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[Field]:
    """Yield every field that is not a section, depth first, in the order of the code."""
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner:
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield _leaf(f"{prefix}{name}", field)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model that a field holds, alone or in a list."""
    if typing.get_origin(annotation) is dict:
        return None
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            # Volumes and the like are values; a section has a default or is required.
            return None if typing.get_origin(annotation) is types.UnionType else kind
    return None


def summary_of(section: type[BaseModel]) -> str:
    """Return the first paragraph of a section's docstring."""
    return (section.__doc__ or "").partition("\n\n")[0]


def _leaf(name: str, found: FieldInfo) -> Field:
    return Field(
        name=name,
        kind=_named(found.annotation),
        default=found.default,
        unit=next((unit for end, unit in _UNITS.items() if name.endswith(end)), ""),
        limits=", ".join(
            f"{sign} {getattr(item, limit):g}"
            for item in found.metadata
            for limit, sign in _LIMITS
            if getattr(item, limit, None) is not None
        ),
        description=found.description or "",
    )


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


def _unknown(name: str) -> BadInput:
    known = [field.name for field in leaves(RunConfig)]
    known += {field.rpartition(".")[0] for field in known if "." in field}
    last = name.rpartition(".")[2]
    # The user may know only the last part of a name.
    same = [field for field in known if field.rpartition(".")[2] == last]
    close = same or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return BadInput(
        f"field {shown(name)}: no such field",
        remedy=f"did you mean {' or '.join(close)}?"
        if close
        else "`steadytrain schema` lists every field",
    )


@dataclass(frozen=True)
class Decision:
    """A choice for one field of the configuration.

    value: None if it is still open.
    yours: whether the user set it.
    """

    field: str
    value: Any
    reason: str
    yours: bool = False

    @property
    def text(self) -> str:
        """The value as people write it."""
        value = self.value
        if value is None:
            return "(open)"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return ",".join(map(str, value))
        return power(value) if isinstance(value, float) else str(value)


def set_by_user(config: RunConfig, field: str) -> Decision:
    """Return the user's own value unchanged, without evaluating it."""
    value = reduce(getattr, field.split("."), config)
    return Decision(field, value, "set by you", yours=True)


def differs(config: RunConfig, field: str) -> bool:
    """Return whether a field differs from its default.

    A run receives its configuration with all defaults filled in. If a value equals the default,
    nobody can tell whether the user set it.
    """
    section, _, name = field.rpartition(".")
    holder: Any = reduce(getattr, section.split("."), config)
    return bool(getattr(holder, name) != type(holder).model_fields[name].default)


def power(value: float) -> str:
    """Return a number as people write it, with an exponent below 0.01: 2e-4."""
    if not 0 < value < 0.01:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
