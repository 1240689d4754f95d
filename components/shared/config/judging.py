"""How a trained model is judged, promoted and recorded."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from steadytrain.components.shared.config.base import Section, at_odds

GREATER_IS_BETTER: Final = {
    "loss": False,
    "perplexity": False,
    "bits_per_byte": False,
    "accuracy": True,
    "macro_f1": True,
    "auroc": True,
}
"""The metrics of the evaluation, and their directions."""


class EvaluationConfig(Section):
    """Evaluation on the test side."""

    batch_size: int = Field(8, ge=1, description="sequences a forward pass")
    max_examples: int | None = Field(
        None, ge=1, description="a fixed sample of the test side, by content hash; none: all"
    )
    bootstrap_samples: int = Field(1000, ge=100)
    confidence: float = Field(0.95, gt=0.5, lt=1)


class GateConfig(Section):
    """When the candidate becomes champion."""

    margin: float = Field(
        0.0,
        ge=0,
        description="relative improvement that the lower end of the interval must exceed",
    )
    floors: dict[str, float] = Field(
        default={},
        description="metric: worst value allowed (an upper bound where lower is better)",
    )
    max_slice_regression: float | None = Field(
        None, ge=0, description="relative loss allowed in any slice; none: slices do not decide"
    )
    min_slice_examples: int = Field(20, ge=1, description="smaller slices do not decide")

    @field_validator("floors")
    @classmethod
    def _known_metrics(cls, floors: dict[str, float]) -> dict[str, float]:
        unknown = sorted(floors.keys() - GREATER_IS_BETTER.keys())
        if unknown:
            raise ValueError(
                f"no metric {', '.join(unknown)}: one of {', '.join(GREATER_IS_BETTER)}"
            )
        return floors


class RetrainConfig(Section):
    """When the pipeline `retrain` goes on past its look at the data.

    How shifts are measured, and where the defaults come from: components/look/drift.py.
    """

    when: Literal["new_data", "drift"] = Field(
        "new_data",
        description="drift: new data are not enough, one of the shifts must be above its limit",
    )
    max_length_shift: float = Field(
        0.25, ge=0, description="of records' lengths; population stability index"
    )
    max_label_shift: float = Field(
        0.1, ge=0, le=1, description="of the labels' shares; Jensen-Shannon distance"
    )
    max_word_shift: float = Field(
        0.1, ge=0, le=1, description="of the words' shares; Jensen-Shannon distance"
    )


def _not_reserved(alias: str) -> str:
    if re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE):
        raise ValueError("MLflow keeps `latest` and v1, v2, ... for itself")
    return alias


# ASCII only: some databases take é for e, and a trailing line end for nothing.
Alias = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=100), AfterValidator(_not_reserved)
]


class RegistryConfig(Section):
    """Names in the MLflow registry."""

    # Also the name of a lock file and part of a query in MLflow.
    model_name: str | None = Field(
        None,
        pattern=r"^[^\s/:\\'`\x00-\x1f.]([^/:\\'`\x00-\x1f]{0,198}[^\s/:\\'`\x00-\x1f])?$",
        description="registered model: no / : \\ ' or `, no leading dot, no space at either end; "
        "none: the run's `name`",
    )
    candidate_alias: Alias = "candidate"
    champion_alias: Alias = "champion"
    lock: str | None = Field(
        None,
        description="folder or s3:// address of the lock that promotions of all machines share; "
        "none: the output folder",
    )

    @model_validator(mode="after")
    def _candidates_are_no_champions(self) -> Self:
        # Some databases ignore case. The default names keep their meaning, since other runs of
        # the same model may use them.
        candidate, champion = self.candidate_alias, self.champion_alias
        if candidate.lower() in {champion.lower(), "champion"}:
            raise at_odds(
                "registry.candidate_alias",
                candidate,
                "is the name of a champion, which only the gate gives",
                "choose another one, such as candidate",
            )
        if champion.lower() == "candidate":
            raise at_odds(
                "registry.champion_alias",
                champion,
                "is the name of candidates, which the gate may have rejected",
                "choose another one, such as champion",
            )
        return self


class TrackingConfig(Section):
    """Where metrics and artifacts go."""

    uri: str | None = Field(
        None,
        description="none: MLFLOW_TRACKING_URI, or SQLite in the output folder",
    )
    experiment: str = "steadytrain"

    @model_validator(mode="after")
    def _no_query(self) -> Self:
        # MLflow puts its paths behind it, so that it serves nobody; it may be a key.
        if self.uri and re.match(r"\s*https?:[^?#]*[?#]", self.uri, re.IGNORECASE):
            raise at_odds(
                "tracking.uri",
                f"{re.split('[?#]', self.uri)[0]}?...",
                "the address of a server has no query",
                "leave out what begins with ? or #; a token is taken from MLFLOW_TRACKING_TOKEN",
            )
        return self
