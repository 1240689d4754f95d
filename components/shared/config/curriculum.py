"""Curriculum learning: easy records first."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from steadytrain.components.shared.config.base import Section, at_odds, complete_address
from steadytrain.components.shared.config.effects import Effect, IfSet, Use

CUTS: Final = "sequence_length"
"""The kind that cuts documents instead of ordering records."""
_NEEDED: Final = {"column": "column", "loss": "model"}
"""The field that a kind of curriculum needs, and no other one reads."""
_MEANING: Final = {
    "column": "the column with the difficulty",
    "model": "the address of a model that knows the task",
}


class CurriculumConfig(Section):
    """Training begins with the easiest records, and soon draws from all (Bengio et al. 2009)."""

    by: Literal["none", "length", "loss", "column", "sequence_length"] = Field(
        "none",
        description="What makes a record difficult. length: its tokens; loss: the loss of "
        "training.curriculum.model; column: a number in the data; none: there is no curriculum. "
        "sequence_length: its length, so early steps cut documents into shorter ones.",
    )
    column: Annotated[str | None, Effect.ENCODING, IfSet(but=~Use.DATA)] = Field(
        None, min_length=1, description="Column with the difficulty, a number. Only for by: column."
    )
    model: Annotated[str | None, IfSet()] = Field(
        None,
        min_length=1,
        description="Reference model whose loss says how difficult a row is: an address as for "
        "model.base. It has the same tokens or labels. Only for by: loss.",
    )
    pacing: Literal["linear", "root", "step"] = Field(
        "root",
        description="How the share of records, or of the length, grows from start to 1. linear: "
        "evenly; root: as a square root, so that each new record stays new for longer (Platanios "
        "et al. 2019); step: at once, at the end.",
    )
    start: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of the easiest records that the first step draws from. With "
        "sequence_length: of data.sequence_length, at which it cuts.",
    )
    over: float = Field(
        0.5,
        gt=0,
        description="Optimizer steps of the curriculum. A value up to 1 is a share of all steps.",
    )

    @property
    def on(self) -> bool:
        """Whether there is a curriculum."""
        return self.by != "none"

    @property
    def orders(self) -> bool:
        """Whether it is an order of the records."""
        return self.by not in ("none", CUTS)

    @field_validator("model")
    @classmethod
    def _names_something(cls, address: str | None) -> str | None:
        return None if address is None else complete_address(address)

    @model_validator(mode="after")
    def _is_read(self) -> Self:
        if self.on:
            return self
        for name in sorted(self.model_fields_set - {"by", *_NEEDED.values()}):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise at_odds(
                    f"training.curriculum.{name}",
                    getattr(self, name),
                    "there is no curriculum (training.curriculum.by is none)",
                    "set training.curriculum.by, or leave it out",
                )
        return self

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        for by, name in _NEEDED.items():
            value = getattr(self, name)
            if self.by == by and value is None:
                raise at_odds(
                    "training.curriculum.by",
                    self.by,
                    f"training.curriculum.{name} is missing",
                    f"set it to {_MEANING[name]}",
                )
            if self.by != by and value is not None:
                raise at_odds(
                    f"training.curriculum.{name}",
                    value,
                    f"training.curriculum.by is {self.by}, which reads no {name}",
                    f"set by to {by}, or leave it out",
                )
        return self

    def steps(self, total: int) -> int:
        """Return the optimizer steps of the curriculum.

        Args:
            total: of the complete run.
        """
        return max(1, round(self.over * total) if self.over <= 1 else int(self.over))
