"""The types of a study's records: a checksum says that one is unchanged, not that it makes sense.

`history.py` says what each kind means.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from steadytrain.components.shared.quantities import is_number

_Number = Annotated[int, Field(ge=0)]
_Until = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _step_and_metrics(pair: list[Any]) -> list[Any]:
    step, metrics = pair
    if not isinstance(step, int) or isinstance(step, bool) or not isinstance(metrics, dict):
        raise ValueError("is not a step with its metrics")
    if not all(isinstance(name, str) and is_number(value) for name, value in metrics.items()):
        raise ValueError("has a metric that is not a number")
    return pair


_Validation = Annotated[
    list[Any], Field(min_length=2, max_length=2), AfterValidator(_step_and_metrics)
]


@with_config(ConfigDict(extra="allow", strict=True))
class _Opened(TypedDict):
    kind: Literal["opened"]
    study: str
    queued: list[dict[str, Any]]
    config: NotRequired[str]


@with_config(ConfigDict(extra="allow", strict=True))
class _Budget(TypedDict):
    kind: Literal["budget"]
    limits: dict[str, Any]


@with_config(ConfigDict(extra="allow", strict=True))
class _Started(TypedDict):
    kind: Literal["started"]
    number: _Number
    params: dict[str, Any]
    until: _Until


@with_config(ConfigDict(extra="allow", strict=True))
class _Promoted(TypedDict):
    kind: Literal["promoted"]
    number: _Number
    until: _Until


@with_config(ConfigDict(extra="allow", strict=True))
class _Reported(TypedDict):
    kind: Literal["reported"]
    number: _Number
    until: _Until
    step: _Number
    finished: bool
    validations: list[_Validation]
    seconds: _Seconds
    fallbacks: list[str]
    latency_ms: NotRequired[float]


@with_config(ConfigDict(extra="allow", strict=True))
class _Failed(TypedDict):
    kind: Literal["failed"]
    number: _Number
    failure: str
    error: str
    seconds: _Seconds


@with_config(ConfigDict(extra="allow", strict=True))
class _Discarded(TypedDict):
    kind: Literal["discarded"]
    number: _Number


RECORDS: Final[TypeAdapter[Any]] = TypeAdapter(
    Annotated[
        _Opened | _Budget | _Started | _Promoted | _Reported | _Failed | _Discarded,
        Field(discriminator="kind"),
    ]
)
"""Checks a record: `validate_python` raises a ValueError that names the field."""
