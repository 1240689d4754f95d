"""Curriculum learning: easy records first."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from steadytrain.components.shared.config.base import Section, at_odds


class CurriculumConfig(Section):
    """Training begins with the easiest records, and soon draws from all (Bengio et al. 2009)."""

    by: Literal["none", "length", "column"] = Field(
        "none",
        description="What makes a record difficult. length: its tokens; column: a number in the "
        "data, such as a reference model's loss; none: there is no curriculum.",
    )
    column: str | None = Field(
        None, min_length=1, description="Column with the difficulty, a number. Only for by: column."
    )
    pacing: Literal["linear", "root", "step"] = Field(
        "root",
        description="How the share of records grows from start to 1. linear: evenly; root: as a "
        "square root, so that each new record stays new for longer (Platanios et al. 2019); step: "
        "at once, at the end.",
    )
    start: float = Field(
        0.2, gt=0, lt=1, description="Share of the easiest records that the first step draws from."
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

    @model_validator(mode="after")
    def _is_read(self) -> Self:
        if self.on:
            return self
        for name in sorted(self.model_fields_set - {"by", "column"}):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise at_odds(
                    f"training.curriculum.{name}",
                    getattr(self, name),
                    "there is no curriculum (training.curriculum.by is none)",
                    "set training.curriculum.by, or leave it out",
                )
        return self

    @model_validator(mode="after")
    def _has_a_column(self) -> Self:
        if self.by == "column" and self.column is None:
            raise at_odds(
                "training.curriculum.by",
                self.by,
                "the column is missing",
                "set training.curriculum.column to the column with the difficulty",
            )
        if self.by != "column" and self.column is not None:
            raise at_odds(
                "training.curriculum.column",
                self.column,
                f"training.curriculum.by is {self.by}, which reads no column",
                "set by to column, or leave it out",
            )
        return self

    def steps(self, total: int) -> int:
        """Return the optimizer steps of the curriculum.

        Args:
            total: of the complete run.
        """
        return max(1, round(self.over * total) if self.over <= 1 else int(self.over))
