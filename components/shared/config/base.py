"""What all sections of the configuration share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
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


class Section(BaseModel):
    """A configuration section: immutable, keyword-only, finite numbers, no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


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
