"""How a trained model is evaluated, promoted and recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.effects import (
    Effect,
    IfSet,
    Section,
    at_odds,
    check_plugins,
    check_unread,
)
from steadytrain.components.techniques.adversarial_training import AttackConfig


class LandscapeConfig(Section):
    """Loss of the trained model on a grid around its weights (Li et al. 2018)."""

    points: int = Field(
        0,
        ge=0,
        le=51,
        description="Points on each side of the square grid: an odd number, such as 15, so that "
        "the trained weights are in the middle. 0 turns it off.",
    )
    radius: float = Field(
        1.0,
        gt=0,
        le=100,
        description="Farthest step along each of the two directions. A step of 1 along one of them "
        "is as long as the weights themselves, filter by filter.",
    )
    records: int = Field(
        64, ge=1, description="Size of the fixed sample of test records that the loss is taken on."
    )

    @property
    def on(self) -> bool:
        """Whether it is measured."""
        return self.points > 0

    @property
    def scorings(self) -> int:
        """How often the sample is scored."""
        return self.points**2

    @field_validator("points")
    @classmethod
    def _has_a_middle(cls, points: int) -> int:
        if points and (points < 3 or points % 2 == 0):
            raise ValueError("is not an odd number from 3 to 51: use 15, or 0 to turn it off")
        return points

    @model_validator(mode="after")
    def _is_read(self) -> Self:
        if not self.on:
            field = "evaluation.landscape.points"
            others, fix = ("radius", "records"), f"set {field}, such as 15"
            check_unread(self, "evaluation.landscape", others, f"with {field} 0", fix)
        return self


class EvaluationConfig(Section):
    """Evaluation on the test side."""

    batch_size: int = Field(
        8, ge=1, description="Sequences per forward pass, or fewer if they do not fit in memory."
    )
    max_examples: int | None = Field(
        None,
        ge=1,
        description="Size of a fixed sample of the test data, chosen by content hash. None "
        "means all test data.",
    )
    bootstrap_samples: int = Field(
        1000, ge=100, description="Bootstrap resamples behind each confidence interval."
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Level of the confidence intervals.")
    attack: AttackConfig = AttackConfig()
    character_noise: Annotated[float, IfSet()] = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the characters of each test text that get a typing error, to measure "
        "the metrics of a classifier once more. 0 turns it off.",
    )
    landscape: LandscapeConfig = LandscapeConfig()
    tasks: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="lm-eval tasks for a language model: paths of YAML files, or names of "
        "installed tasks. Their data must be on this machine.",
    )

    @field_validator("tasks")
    @classmethod
    def _once_each(cls, tasks: list[str]) -> list[str]:
        twice = [name for index, name in enumerate(tasks) if name in tasks[:index]]
        if twice:
            raise ValueError(f"{twice[0]!r} appears twice")
        return tasks

    @property
    def robustness(self) -> list[str]:
        """The fields that ask for a measurement of robustness."""
        asked = {"attack": self.attack.on, "character_noise": self.character_noise > 0}
        return [name for name, on in asked.items() if on]


class GateConfig(Section):
    """When the candidate becomes the champion."""

    metric: str | None = Field(
        None,
        pattern=r"^[^/]+(/[^/]+)*$",
        description="Metric that the gate compares models by: a metric on the test data, or "
        "TASK/METRIC of evaluation.tasks. None means accuracy, bits per byte or loss on the test "
        "data.",
    )
    margin: float = Field(
        0.001,
        ge=0,
        description="Smallest relevant improvement, relative to the other model. The lower end of "
        "the confidence interval must exceed it.",
    )
    min_units: int = Field(
        30,
        ge=2,
        description="Independent test examples that a decision needs (groups of "
        "data.columns.group, and answers to one prompt, count once). With fewer, the gate "
        "leaves the candidate undecided, and does not promote it.",
    )
    beat_baseline: bool = Field(
        True,
        description="Whether the candidate must beat the naive baseline, such as the most frequent "
        "label. Turn it off only to try the pipeline with a model that has learned next to "
        "nothing.",
    )
    floors: dict[str, float] = Field(
        default={},
        description="Worst allowed value of each metric or TASK/METRIC of evaluation.tasks. If "
        "lower is better, it is an upper bound.",
    )
    max_slice_regression: float | None = Field(
        None,
        ge=0,
        description="Largest relative loss allowed in any slice. None means slices do not "
        "affect the decision. With data.parts it is required, and the lower end of each part's "
        "interval must not be a larger loss.",
    )
    min_slice_examples: int = Field(
        20, ge=1, description="Examples that a slice needs to affect the decision."
    )
    compared: Annotated[int, Effect.SEARCHED] = Field(
        1,
        ge=1,
        description="Number of configurations that a search compared to choose this one. The "
        "gate divides the probability of a wrong promotion by it.",
    )
    promised: Annotated[float | None, Effect.SEARCHED, IfSet()] = Field(
        None,
        allow_inf_nan=False,
        description="Loss that a search promised for this configuration, corrected for the choice "
        "among those that it compared. The model card shows it next to the test side's. The gate "
        "does not use it.",
    )

    @property
    def task_metric(self) -> str | None:
        """The metric, if it is one of `evaluation.tasks`."""
        return self.metric if self.metric and "/" in self.metric else None

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, metric: str | None) -> str | None:
        if metric is not None:
            _check_metrics([metric])
        return metric

    @field_validator("floors")
    @classmethod
    def _known_metrics(cls, floors: dict[str, float]) -> dict[str, float]:
        _check_metrics(floors)
        return floors


def _check_metrics(names: Iterable[str]) -> None:
    own = [name for name in names if "/" not in name]
    if own:
        check_plugins(plugins.METRICS, own, otherwise=", or name TASK/METRIC of evaluation.tasks")


class RetrainConfig(Section):
    """When the pipeline `retrain` continues after it has checked the data.

    components/detect_change/step.py explains how it measures shifts and where the defaults come
    from.
    """

    when: Literal["new_data", "drift"] = Field(
        "new_data",
        description="When to train again. new_data: if there is new data; drift: only if one of "
        "the shifts below also exceeds its limit.",
    )
    max_length_shift: float = Field(
        0.25, ge=0, description="Limit on the shift of record lengths (population stability index)."
    )
    max_label_shift: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Limit on the shift of label frequencies (Jensen-Shannon distance).",
    )
    max_word_shift: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Limit on the shift of word frequencies (Jensen-Shannon distance).",
    )


def _not_reserved(alias: str) -> str:
    if re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE):
        raise ValueError("MLflow keeps `latest` and v1, v2, ... for itself")
    return alias


# ASCII only: some databases treat é as e, and ignore a trailing newline.
Alias = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=100), AfterValidator(_not_reserved)
]


class RegistryConfig(Section):
    """Names in the MLflow registry."""

    # The name is also used for a lock file and in MLflow queries.
    model_name: str | None = Field(
        None,
        pattern=r"^[^\s/:\\'`\x00-\x1f.]([^/:\\'`\x00-\x1f]{0,198}[^\s/:\\'`\x00-\x1f])?$",
        description="Name of the registered model: no / : \\ ' or `, no leading dot, and no space "
        "at either end. None means the run's `name`.",
    )
    candidate_alias: Alias = Field(
        "candidate", description="Alias of the newest registered version."
    )
    champion_alias: Alias = Field(
        "champion", description="Alias of the champion. Only a promotion by the gate moves it."
    )
    lock: str | None = Field(
        None,
        description="Folder or s3:// address of the lock that promotions on all machines share. "
        "None means the output folder.",
    )

    @model_validator(mode="after")
    def _candidates_are_no_champions(self) -> Self:
        # Some databases ignore case. The default names keep their meaning because other runs of the
        # same model may use them.
        candidate, champion = self.candidate_alias, self.champion_alias
        if candidate.lower() in {champion.lower(), "champion"}:
            raise at_odds(
                "registry.candidate_alias",
                candidate,
                "is the alias of a champion, which only the gate sets",
                "choose another one, such as candidate",
            )
        if champion.lower() == "candidate":
            raise at_odds(
                "registry.champion_alias",
                champion,
                "is the alias of candidates, which the gate may have rejected",
                "choose another one, such as champion",
            )
        return self


class TrackingConfig(Section):
    """Where metrics and artifacts go."""

    uri: Annotated[str | None, Effect.GATE] = Field(
        None,
        description="Address of the MLflow tracking store. None means MLFLOW_TRACKING_URI, or "
        "SQLite in the output folder if that is not set.",
    )
    sinks: list[str] = Field(
        ["mlflow"],
        description="Where training events go while training runs: mlflow, tensorboard, wandb, "
        "otlp, or names that installed packages add.",
    )
    experiment: str = Field(
        "steadytrain",
        description="Name of the MLflow experiment. The default gives way to "
        "MLFLOW_EXPERIMENT_NAME and MLFLOW_EXPERIMENT_ID.",
    )

    @field_validator("sinks")
    @classmethod
    def _known_sinks(cls, sinks: list[str]) -> list[str]:
        # Skip the default: listing all installed packages takes 50 ms.
        if sinks != cls.model_fields["sinks"].default:
            check_plugins(plugins.SINKS, sinks)
        return sorted(set(sinks))

    @model_validator(mode="after")
    def _no_query(self) -> Self:
        # MLflow appends its paths after the query, so such an address never works. The query may
        # also contain a key.
        if self.uri and re.match(r"\s*https?:[^?#]*[?#]", self.uri, re.IGNORECASE):
            raise at_odds(
                "tracking.uri",
                f"{re.split('[?#]', self.uri)[0]}?...",
                "a server's address must have no query and no fragment",
                "remove everything from ? or # on; put a token in MLFLOW_TRACKING_TOKEN",
            )
        return self
