"""The contrastive loss of texts: the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import Use, at_odds
from steadytrain.components.shared.errors import Problem
from steadytrain.components.techniques.settings import (
    SMALLER_MICRO_BATCH,
    ObjectiveConfig,
    Recipe,
    Rule,
)


class BatchContrastiveConfig(ObjectiveConfig):
    """Pulling together the texts of a micro-batch that belong together, and the others apart.

    Those of one class (Khosla et al. 2020), or of one pair (Henderson et al. 2017).
    """

    rows: Annotated[int | None, Use.MEMORY] = Field(
        None,
        ge=2,
        description="Texts that are compared with each other: the micro-batch of every rank, in "
        "place of training.micro_batch_size. None turns the loss off.",
    )
    weight: float = Field(
        0.5,
        gt=0,
        description="Weight of this loss, which is added to the loss on the labels. "
        "text_embedding has no other loss, and no weight.",
    )
    temperature: float = Field(
        0.1,
        gt=0,
        description="Divides the cosine similarities. A lower one counts the most similar texts "
        "that do not belong together more. SimCSE uses 0.05.",
    )

    @property
    def on(self) -> bool:
        return self.rows is not None

    def task_problems(self, task: str) -> Iterator[Problem]:
        """Yield what is wrong for a task whose whole loss this is."""
        if not self.on:
            yield Problem(
                "training.batch_contrastive.rows",
                "None",
                f"all that data.task {task} learns is to tell the texts of a micro-batch apart",
                "set the number of those texts, such as 32",
            )
        elif self.weight != type(self).model_fields["weight"].default:
            yield Problem(
                "training.batch_contrastive.weight",
                repr(self.weight),
                f"the loss of data.task {task} has no other part",
                "leave it out",
            )

    def check(self, recipe: Recipe) -> None:
        size = recipe.micro_batch_size
        if self.rows is not None and size not in (None, self.rows):
            raise at_odds(
                "training.micro_batch_size",
                size,
                "with training.batch_contrastive, the size of the micro-batch is part of what the "
                f"model learns, and training.batch_contrastive.rows sets it to {self.rows}",
                "leave it out",
            )

    @model_validator(mode="after")
    def _is_read(self) -> BatchContrastiveConfig:
        self._check_off("batch_contrastive", "rows")
        return self


RULES: Final = (
    Rule(
        "training.batch_contrastive", SMALLER_MICRO_BATCH, "it compares the rows of a micro-batch"
    ),
    Rule(
        "training.batch_contrastive",
        "recovery.min_nodes",
        "it compares the rows of a micro-batch, which may change on fewer nodes",
    ),
    Rule(
        "training.batch_contrastive",
        "training.r_drop",
        "it compares the rows of one pass, and R-Drop has two",
    ),
    Rule("training.batch_contrastive", "training.mixup", "a mixture of two texts has no one class"),
)
