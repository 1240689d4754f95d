"""Mixtures of two texts or images: the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import Field

from steadytrain.components.shared.effects import IfSet, at_odds
from steadytrain.components.shared.errors import Problem
from steadytrain.components.techniques.settings import ObjectiveConfig, Recipe, Rule


class MixupConfig(ObjectiveConfig):
    """Mixing two texts (Guo et al. 2019, wordMixup) or two images, and their labels."""

    alpha: float = Field(
        0.0,
        ge=0,
        description="The share of each row in its mixture is drawn from Beta(alpha, alpha): 1 "
        "draws all shares equally often, a smaller value keeps most mixtures close to one. 0 "
        "turns it off.",
    )

    cutmix: Annotated[float, IfSet()] = Field(
        0.0,
        ge=0,
        description="Of images: a rectangle of the partner replaces a part of the image, and its "
        "share of the area is drawn from Beta(cutmix, cutmix) (Yun et al. 2019). With alpha, half "
        "of the images are mixed in each way. 0 turns it off.",
    )

    def task_problems(self, task: str, *, images: bool) -> Iterator[Problem]:
        """Yield why a task does not mix its records in this way.

        Args:
            images: whether its records are images.
        """
        if self.cutmix and not images:
            yield Problem(
                "training.mixup.cutmix",
                repr(self.cutmix),
                f"it cuts a rectangle out of an image, and data.task {task} has none",
                "set training.mixup.alpha instead",
            )

    def check(self, recipe: Recipe) -> None:
        if self.on and recipe.global_batch_size < 2:
            field = "alpha" if self.alpha else "cutmix"
            raise at_odds(
                f"training.mixup.{field}",
                getattr(self, field),
                "it mixes the rows of a global batch, and training.global_batch_size is "
                f"{recipe.global_batch_size}",
                "raise training.global_batch_size to at least 2, or leave it out",
            )


RULES: Final = (
    Rule(
        "training.mixup",
        "data.columns.text_pair",
        "a mixture of two pairs has no first and second text",
    ),
)
