"""How several data sets are mixed, and how much each counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import at_odds
from steadytrain.components.techniques.settings import FLATTEST, ObjectiveConfig, Rule, check_shares

Weight = Annotated[float, Field(gt=0, le=1e9)]


class MultiTaskConfig(ObjectiveConfig):
    """Learning several data sets with one encoder (Caruana 1997, "Multitask Learning")."""

    sampling: Literal["size", "temperature", "weights"] = Field(
        "size",
        description="How often a row of each part is drawn. size: every row once in an epoch; "
        "temperature: in proportion to the number of its rows to the power 1 / temperature; "
        "weights: in proportion to sampling_weights.",
    )
    temperature: float = Field(
        2.0,
        ge=1,
        le=FLATTEST,
        description="Only for temperature. 1 is proportional to the sizes; a high one draws all "
        "parts alike.",
    )
    sampling_weights: dict[str, Weight] = Field(
        {}, description="Weight of each part. Only for weights."
    )
    loss_weights: dict[str, Weight] = Field(
        {},
        description="The factor of each part's loss, by the part's name. Empty means 1 for all.",
    )
    loss_weighting: Literal["fixed", "uncertainty"] = Field(
        "fixed",
        description="fixed: by loss_weights; uncertainty: by weights that are trained with the "
        "model (Kendall, Gal and Cipolla 2018).",
    )

    def features(self) -> Iterator[tuple[str, str, str]]:
        if self.sampling != "size":
            yield "training.multi_task.sampling", "training.multi_task.sampling", self.sampling

    @property
    def learns_weights(self) -> bool:
        """Whether the weights of the parts' losses are trained."""
        return self.loss_weighting == "uncertainty"

    @model_validator(mode="after")
    def _is_read(self) -> MultiTaskConfig:
        if (self.sampling == "weights") != bool(self.sampling_weights):
            raise at_odds(
                "training.multi_task.sampling_weights",
                self.sampling_weights,
                f"training.multi_task.sampling is {self.sampling}",
                "give the weight of each part together with sampling weights, or leave both out",
            )
        check_shares("training.multi_task.sampling_weights", self.sampling_weights)
        if self.learns_weights and self.loss_weights:
            raise at_odds(
                "training.multi_task.loss_weights",
                self.loss_weights,
                f"training.multi_task.loss_weighting is {self.loss_weighting}",
                "leave one of the two out",
            )
        default = type(self).model_fields["temperature"].default
        if self.sampling != "temperature" and self.temperature != default:
            raise at_odds(
                "training.multi_task.temperature",
                self.temperature,
                f"training.multi_task.sampling is {self.sampling}",
                "set sampling to temperature, or leave it out",
            )
        return self


RULES: Final = (
    *(
        Rule("training.multi_task.sampling", other, "it is an order of its own")
        for other in ("another order", "training.curriculum")
    ),
)
