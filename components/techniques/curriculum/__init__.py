"""Curriculum learning, easy records first: the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal, Protocol, Self

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import Address, Effect, IfSet, Use, at_odds
from steadytrain.components.shared.errors import Problem
from steadytrain.components.techniques.settings import PYTORCH_ONLY, Recipe, Rule, TechniqueConfig

CUTS: Final = "sequence_length"
"""The kind that cuts documents instead of ordering records."""
CUT: Final = f"training.curriculum.by {CUTS}"
"""What rules call that kind."""
_NEEDED: Final = {"column": "column", "loss": "model"}
"""The field that a kind of curriculum needs, and no other one reads."""
_MEANING: Final = {
    "column": "the column with the difficulty",
    "model": "the address of a model that knows the task",
}


class TaskTraits(Protocol):
    """What a curriculum depends on in a task: see `tasks.base.Task`."""

    @property
    def contrasts(self) -> bool: ...

    @property
    def cuttable(self) -> bool: ...

    @property
    def grades(self) -> bool: ...


class CurriculumConfig(TechniqueConfig):
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
    model: Annotated[Address | None, IfSet()] = Field(
        None,
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

    def features(self) -> Iterator[tuple[str, str, str]]:
        if self.on:
            yield "training.curriculum" if self.orders else CUT, "training.curriculum.by", self.by

    def check(self, recipe: Recipe) -> None:
        if self.over > 1 and self.over > recipe.max_steps > 0:
            raise at_odds(
                "training.curriculum.over",
                self.over,
                f"training.max_steps is {recipe.max_steps}, so training would end before it has "
                "seen all records",
                "use fewer steps, or a share of all steps up to 1",
            )

    def task_problems(self, task: str, traits: TaskTraits, *, packed: bool) -> Iterator[Problem]:
        """Yield why the rows of a task have no such difficulty.

        Args:
            packed: whether a row may hold several documents.
        """
        why, remedy = "", "use a column, or leave training.curriculum out"
        if self.by == "loss":
            if not traits.grades:
                why = f"data.task {task} has no loss of a row alone under another model"
        elif self.by == CUTS:
            if not traits.cuttable:
                why = f"data.task {task} does not learn from parts of its documents"
                remedy = "use data.task causal_lm, or leave training.curriculum out"
        elif packed:
            why = (
                f"data.task {task} packs several documents into a row, which is neither short nor "
                "has a value of its own"
            )
            remedy = "use by: loss, or leave training.curriculum out"
        elif self.by == "length" and traits.contrasts:
            why = f"data.task {task} compares texts with a random sample of others, of any length"
        if why:
            yield Problem("training.curriculum.by", self.by, why, remedy)

    @property
    def orders(self) -> bool:
        """Whether it is an order of the records."""
        return self.by not in ("none", CUTS)

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


RULES: Final = (
    Rule("training.curriculum", "another framework", PYTORCH_ONLY),
    Rule(CUT, "another framework", PYTORCH_ONLY),
    Rule("training.curriculum", "another order", "it is an order of its own"),
)
