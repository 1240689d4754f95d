"""How the data sets of a language model are mixed, and what happens when one is used up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from steadytrain.components.shared.effects import at_odds
from steadytrain.components.techniques.settings import FLATTEST, Rule, TechniqueConfig, check_shares

Weight = Annotated[float, Field(gt=0, le=1e9)]
Budget = Annotated[int, Field(ge=1)]


class MixtureConfig(TechniqueConfig):
    """Shares of several data sets (`data.parts`) in the tokens that a language model learns."""

    by: Literal["size", "weight", "temperature", "tokens"] = Field(
        "size",
        description="Share of each of data.parts in the tokens that are learned. size: every row "
        "once in an epoch; weight: in proportion to weights; temperature: in proportion to its "
        "tokens to the power 1 / temperature; tokens: in proportion to tokens, and an epoch has as "
        "many.",
    )
    weights: dict[str, Weight] = Field(
        {}, description="Weight of each of data.parts. Only for weight."
    )
    temperature: float = Field(
        2.0,
        ge=1,
        le=FLATTEST,
        description="Only for temperature. 1 is proportional to the sizes; a high one draws all "
        "parts alike.",
    )
    tokens: dict[str, Budget] = Field(
        {}, description="Tokens of each of data.parts to learn in an epoch. Only for tokens."
    )
    exhausted: Literal["repeat", "stop"] = Field(
        "repeat",
        description="When all rows of a part were drawn. repeat: it begins again, in another "
        "order, which is reported; stop: training ends before it would draw a row a "
        "second time.",
    )

    def features(self) -> Iterator[tuple[str, str, str]]:
        if self.on:
            yield "training.mixture", "training.mixture.by", self.by

    def shares(self, tokens: dict[str, int]) -> dict[str, float]:
        """Return the share of each part in the tokens that are learned. They add up to 1.

        Args:
            tokens: of the training side, by part.
        """
        power = 1 / self.temperature if self.by == "temperature" else 1.0
        given = self.weights if self.by == "weight" else self.tokens
        raw = {name: given.get(name) or float(size) ** power for name, size in tokens.items()}
        total = sum(raw.values())
        return {name: value / total for name, value in raw.items()}

    @model_validator(mode="after")
    def _is_read(self) -> MixtureConfig:
        for name, by in (("weights", "weight"), ("tokens", "tokens")):
            if (self.by == by) != bool(value := getattr(self, name)):
                raise at_odds(
                    f"training.mixture.{name}",
                    value,
                    f"training.mixture.by is {self.by}",
                    f"give one number for each of data.parts together with by: {by}, or leave both "
                    "out",
                )
            check_shares(f"training.mixture.{name}", value)
        default = type(self).model_fields["temperature"].default
        if self.by != "temperature" and self.temperature != default:
            raise at_odds(
                "training.mixture.temperature",
                self.temperature,
                f"training.mixture.by is {self.by}",
                "set by to temperature, or leave it out",
            )
        return self


@dataclass(frozen=True)
class Drawn:
    """What training draws of a data set.

    planned, realized: shares of the tokens.
    rows: rows drawn.
    tokens: expected in them, by the mean of the data set's rows.
    passes: how often the data set was gone through.
    """

    name: str
    planned: float
    realized: float
    rows: int
    tokens: float
    passes: float


RULES: Final = (
    *(
        Rule("training.mixture", other, "it is an order of its own")
        for other in ("another order", "training.curriculum")
    ),
)
