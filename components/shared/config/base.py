"""What every section of the configuration shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Seconds = Annotated[float, Field(le=1e9)]
"""Up to 31 years; what the system can wait for ends at some hundred."""


class Section(BaseModel):
    """A part of the configuration: immutable, keyword only, finite, unknown fields refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def at_odds(field: str, value: object, message: str, remedy: str) -> PydanticCustomError:
    """The error of a field that is right by itself and wrong beside another one."""
    told = {"field": field, "value": repr(value), "message": message, "remedy": remedy}
    return PydanticCustomError("at_odds", "{message}", told)
