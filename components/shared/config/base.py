"""What every section of the configuration shares."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: immutable, keyword only, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
