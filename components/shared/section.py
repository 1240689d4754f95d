"""What all sections of the configuration share."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Final, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import BadInput

Seconds = Annotated[float, Field(le=1e9)]
"""At most 31 years. The longest wait that the system supports is several hundred years."""


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not plain JSON: {error}") from None
    return content


PlainJson = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Settings that somebody else defines."""


def complete_address(address: str) -> str:
    """Return an address that names something.

    Raises:
        ValueError: it ends after its kind, as hub: does.
    """
    kind, separator, rest = address.partition(":")
    if separator and kind in _KINDS and not rest.partition("?")[0].strip("/"):
        raise ValueError(f"names nothing: give {_KINDS[kind]}")
    return address


def is_local(address: str) -> bool:
    """Return whether an address is a path, and not one of the other kinds."""
    return address.partition(":")[0] not in _KINDS


_KINDS: Final[Mapping[str, str]] = {
    "hub": "hub:NAME",
    "package": "package:NAME",
    "models": "models:/NAME@ALIAS",
    "s3": "s3://BUCKET/PREFIX",
}
Address = Annotated[str, Field(min_length=1), AfterValidator(complete_address)]
"""Where data are: a path, or one of the kinds of address."""


def _on_disk(folder: str) -> str:
    if "://" in folder or folder.startswith(tuple(f"{kind}:" for kind in _KINDS)):
        raise ValueError("is an address: give a folder; on a cluster, one on a mounted volume")
    if not folder.strip():
        raise ValueError("names nothing: give a folder")
    return folder


Folder = Annotated[str, Field(min_length=1), AfterValidator(_on_disk)]
"""A folder on this machine or, on a cluster, on a mounted volume."""


class Section(BaseModel):
    """A configuration section: immutable, keyword-only, finite numbers, no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values. It computes its cached properties again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return the section itself: nothing changes it, and Pydantic copies each default."""
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: object, info: ValidationInfo) -> object:
        """Reject true and false for a number, which Pydantic would take for 1 and 0."""
        if _misread(value, cls.model_fields[info.field_name or ""].annotation):
            has = "is" if isinstance(value, bool) else "has"
            raise ValueError(f"{has} true or false, and not a number")
        return value


def _misread(value: object, annotation: object) -> bool:
    """Return whether true or false is where only a number may be, also within lists and maps."""
    types = set(_types(annotation))
    if isinstance(value, bool):
        return bool(types & {int, float}) and bool not in types
    if isinstance(value, Mapping):
        members: Iterable[object] = value.values()
    elif isinstance(value, list | tuple):
        members = value
    else:
        return False
    inner = [
        [item for item in get_args(kind) if item is not Ellipsis][-1]
        for kind in types
        if isinstance(origin := get_origin(kind), type) and issubclass(origin, Collection)
    ]
    return bool(inner) and any(all(_misread(item, one) for one in inner) for item in members)


def _types(annotation: object) -> Iterator[object]:
    """Yield a type, or the members of a union."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _types(member)
    else:
        yield annotation


def check_plugins(group: str, names: Iterable[str], *, otherwise: str = "") -> None:
    """Reject names that no installed package provides in a group of entry points.

    Args:
        otherwise: another fix, to append to the message.

    Raises:
        ValueError: if a name is unknown. The message lists the known names.
    """
    try:
        plugins.check(group, names)
    except BadInput as error:
        raise ValueError(f"{error.message}: {error.remedy}{otherwise}") from None


def at_odds(field: str, value: object, message: str, remedy: str) -> PydanticCustomError:
    """Return the error for a field that is valid by itself but conflicts with another field."""
    context = {"field": field, "value": repr(value), "message": message, "remedy": remedy}
    return PydanticCustomError("at_odds", "{message}", context)


def whole_steps(value: float, steps: int) -> int:
    """Return a number of steps; a value below 1 is a fraction of all `steps`."""
    return int(value) if value >= 1 else math.ceil(steps * value)
