"""Counting rare classes more: the settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import at_odds
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.techniques.settings import ObjectiveConfig, Rule


class ClassWeightsConfig(ObjectiveConfig):
    """Counting the examples of some classes more than those of others."""

    kind: Literal["none", "balanced", "given"] = Field(
        "none",
        description="none; balanced: in inverse proportion to the number of training examples of "
        "the class, 1 on average, as in scikit-learn; or given: the weights in `given`.",
    )
    given: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Weight of each label. Only for given."
    )

    @property
    def on(self) -> bool:
        return self.kind != "none"

    def features(self) -> Iterator[tuple[str, str, str]]:
        if self.kind == "balanced":
            yield "training.class_weights balanced", "training.class_weights.kind", "balanced"

    def check_labels(self, labels: Sequence[str]) -> None:
        """Check that given weights are those of the labels of the data.

        Raises:
            BadInput: a label has no weight, or a weight no label.
        """
        unknown = sorted(self.given.keys() - set(labels))
        missing = sorted(set(labels) - self.given.keys())
        if self.given and (unknown or missing):
            what = f"{unknown[0]!r} is not a label" if unknown else f"{missing[0]!r} has no weight"
            raise BadInput(
                f"training.class_weights.given = {dict(self.given)}: {what}",
                remedy=f"give one weight for each of {', '.join(labels)}",
            )

    @model_validator(mode="after")
    def _is_read(self) -> ClassWeightsConfig:
        if (self.kind == "given") != bool(self.given):
            raise at_odds(
                "training.class_weights.given",
                self.given,
                f"training.class_weights.kind is {self.kind}",
                "give the weight of each label together with kind given, or leave both out",
            )
        return self


RULES: Final = (
    Rule(
        "training.class_weights balanced",
        "training.order balanced",
        "both make up for rare classes",
    ),
)
