"""What every section of the configuration shares."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A part of the configuration: immutable, keyword only, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def at_odds(field: str, value: object, message: str, remedy: str) -> PydanticCustomError:
    """The error of a field that is right by itself and wrong beside another one."""
    told = {"field": field, "value": repr(value), "message": message, "remedy": remedy}
    return PydanticCustomError("at_odds", "{message}", told)
