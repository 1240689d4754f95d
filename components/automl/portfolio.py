"""The portfolio: which configurations a search tries, in which order, and what it searches around.

A package adds a family with an entry point in the group `steadytrain.families` that names a
`Family`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import Dimension, RunConfig
from steadytrain.components.shared.config.data_sections import NETWORKS, SERIES, TABLES

MONOTONE: Final = "monotone"
"""The one setting of `model.config` that a search takes from its user."""
RATE: Final = "learning_rate"
"""The setting of an entry that is `training.learning_rate`; the others are `model.config`'s."""
DEFAULT: Final = "LightGBM, its defaults"
"""The configuration that the result is compared with."""
_PATIENCE: Final = 3
"""Validations without an improvement after which boosting stops."""


@dataclass(frozen=True)
class Family:
    """Configurations of one kind of model.

    config: `model.config` of all of them.
    entries: by name, the index in the portfolio and the settings that differ.
    package: module that they need besides steadytrain's own; "" for none.
    max_steps: most steps of a configuration; early stopping ends it before, if there are several.
        0 means as many as `training` says, without early stopping.
    space: the settings to search, by name, if the family leads.
    interpretable: whether people can read such a model.
    seconds: roughly, for a million values on one core: of the table, or of what a network reads in
        an epoch.
    tasks: those that it is for.
    eval_steps: steps between two validations.
    reads_covariates: whether it learns from those of time series.
    least_times: how many times each series must have to learn from.
    monotone: whether its models keep `model.config.monotone`.
    weighs: whether they count some records more than others, by a column or by class.
    starts: where its models start: from `model.base`, from scratch, or as `model` says.
    """

    framework: str
    config: Mapping[str, Any]
    entries: Mapping[str, tuple[int, Mapping[str, Any]]]
    package: str = ""
    max_steps: int = 1
    space: Mapping[str, Dimension] = field(default_factory=dict)
    interpretable: bool = False
    seconds: float = 1.0
    tasks: Sequence[str] = TABLES
    eval_steps: int = 1
    reads_covariates: bool = True
    least_times: int = 1
    monotone: bool = False
    weighs: bool = True
    starts: Literal["base", "scratch", "as it says"] = "as it says"

    def __post_init__(self) -> None:
        if self.dotted and not {*self.tasks} <= {*NETWORKS}:
            raise ValueError(
                f"{min(self.dotted)} is a field of the run, which no member of an ensemble of "
                "tables or series has: use settings of model.config"
            )

    @property
    def dotted(self) -> frozenset[str]:
        """The fields of the run that its entries set or that are searched."""
        settings = [self.space, *(given for _, given in self.entries.values())]
        return frozenset(name for each in settings for name in each if "." in name)


@dataclass(frozen=True)
class Configuration:
    """A configuration that a search compares.

    name: unique within a search.
    family: its name.
    settings: of `model.config`, with `learning_rate` if it has one; of networks, those with a dot
        in their names are fields of the run's configuration.
    unfit: why it cannot learn from the data, so that no unit starts; "" if it can.
    """

    name: str
    family: str
    settings: Mapping[str, Any]
    unfit: str = ""

    def as_plain(self) -> dict[str, Any]:
        """Return it for the log of a study."""
        plain = {"name": self.name, "family": self.family, "settings": dict(self.settings)}
        return {**plain, "unfit": self.unfit} if self.unfit else plain

    def fields(self, family: Family) -> dict[str, Any]:
        """Return the fields of the run's configuration that it sets."""
        fields = {name: value for name, value in self.settings.items() if "." in name}
        config = {
            name: value
            for name, value in self.settings.items()
            if name not in fields and name != RATE
        }
        if family.config or config:
            fields["model.config"] = {**family.config, **config}
        if family.max_steps:
            steps = 10 if self.name == DEFAULT else family.max_steps
            fields |= {"training.max_steps": steps, "training.eval_steps": family.eval_steps}
        stops = family.max_steps > 1 and self.name != DEFAULT
        return {
            "model.framework": family.framework,
            "training.learning_rate": self.settings.get(RATE),
            "training.early_stopping_patience": _PATIENCE if stops else None,
            "training.load_best_model_at_end": stops or not family.max_steps,
            **fields,
        }


def chosen_fields(task: str) -> frozenset[str]:
    """Return the fields that the families for a task set."""
    known = [family for family in families().values() if task in family.tasks]
    return frozenset(
        field
        for family in known
        for name, (_, settings) in family.entries.items()
        for field in Configuration(name, "", settings).fields(family)
    ).union(*(family.dotted for family in known))


def families() -> dict[str, Family]:
    """Return all families by name.

    Raises:
        BadInput: that of a package cannot be imported, or is none.
    """
    names = plugins.names(plugins.FAMILIES)
    return {name: plugins.load_as(plugins.FAMILIES, name, Family) for name in names}


def portfolio(config: RunConfig) -> tuple[list[Configuration], dict[str, str]]:
    """Return the portfolio of a search in its order, and why others are left out, by name."""
    monotone = config.model.config.get(MONOTONE)
    kept = {MONOTONE: monotone} if monotone else {}
    entries, skipped = list[tuple[int, Configuration]](), dict[str, str]()
    for family, item in families().items():
        if config.data.task not in item.tasks:
            continue
        obstacle = _obstacle(item, config)
        for name, (index, settings) in item.entries.items():
            entries.append((index, Configuration(name, family, {**settings, **kept})))
            if obstacle:
                skipped[name] = obstacle
    ordered = [item for _, item in sorted(entries, key=lambda pair: (pair[0], pair[1].name))]
    return [item for item in ordered if item.name not in skipped], skipped


def _obstacle(family: Family, config: RunConfig) -> str:
    limits, data = config.automl.constraints, config.data
    if family.starts == "base" and not config.model.base:
        return "model.base names no model to start from"
    if family.starts == "scratch" and config.model.base:
        return "model.base is fine-tuned instead"
    if data.series.covariates and not family.reads_covariates:
        return "it learns from no data.series.covariates"
    if config.model.config.get(MONOTONE) and not family.monotone:
        return "its models cannot keep model.config.monotone"
    if (data.columns.weight or config.training.class_weights.on) and not family.weighs:
        return "its models cannot weigh records"
    if family.package and importlib.util.find_spec(family.package) is None:
        return f"the package {family.package} is not installed"
    if limits.frameworks and family.framework not in limits.frameworks:
        return "automl.constraints.frameworks leaves it out"
    if limits.interpretable and not family.interpretable:
        return "automl.constraints.interpretable leaves it out"
    return ""


# The order of tables is learned on tables for development (tests/bench/test_portfolio.py).
_BOOSTING: Final = {"low": 0.02, "high": 0.3, "log": True}
DUMMY = Family(
    "sklearn", {"model_type": "dummy"}, {"dummy": (0, {})}, interpretable=True, seconds=0
)
LINEAR = Family(
    "sklearn",
    {"model_type": "linear"},
    {
        "linear": (1, {"penalty": 1.0}),
        "linear, strong penalty": (18, {"penalty": 100.0}),
        "linear, weak penalty": (11, {"penalty": 0.01}),
    },
    space={"penalty": Dimension(low=1e-3, high=1e4, log=True)},
    interpretable=True,
    seconds=2.0,
)
LIGHTGBM = Family(
    "lightgbm",
    {"model_type": "lightgbm", "rounds_per_step": 10},
    {
        DEFAULT: (2, {"num_leaves": 31, "min_data_in_leaf": 20, RATE: 0.1}),
        "LightGBM, slow": (
            13,
            {"num_leaves": 31, "min_data_in_leaf": 20, "feature_fraction": 0.8, RATE: 0.05},
        ),
        "LightGBM, few leaves": (
            3,
            {"num_leaves": 7, "min_data_in_leaf": 5, "feature_fraction": 0.6, RATE: 0.08},
        ),
        "LightGBM, random splits": (
            4,
            {"num_leaves": 31, "min_data_in_leaf": 10, "extra_trees": True, RATE: 0.08},
        ),
        "LightGBM, many leaves": (
            15,
            {"num_leaves": 127, "min_data_in_leaf": 5, "feature_fraction": 0.7, RATE: 0.05},
        ),
        "LightGBM, penalized": (
            16,
            {
                "num_leaves": 31,
                "min_data_in_leaf": 40,
                "lambda_l2": 10.0,
                "feature_fraction": 0.5,
                "bagging_fraction": 0.8,
                "bagging_freq": 1,
                RATE: 0.05,
            },
        ),
    },
    package="lightgbm",
    max_steps=50,
    space={
        "num_leaves": Dimension(low=4, high=255, log=True),
        "min_data_in_leaf": Dimension(low=2, high=100, log=True),
        "feature_fraction": Dimension(low=0.3, high=1.0),
        "lambda_l2": Dimension(low=1e-3, high=100.0, log=True),
        RATE: Dimension(**_BOOSTING),
    },
    seconds=4.0,
    monotone=True,
)
XGBOOST = Family(
    "xgboost",
    {"model_type": "xgboost", "rounds_per_step": 10},
    {
        "XGBoost": (21, {"max_depth": 6, "min_child_weight": 1.0, "subsample": 0.8, RATE: 0.08}),
        "XGBoost, shallow": (
            6,
            {"max_depth": 3, "min_child_weight": 1.0, "subsample": 0.8, RATE: 0.1},
        ),
    },
    package="xgboost",
    max_steps=50,
    space={
        "max_depth": Dimension(low=2, high=10),
        "min_child_weight": Dimension(low=0.1, high=30.0, log=True),
        "subsample": Dimension(low=0.5, high=1.0),
        RATE: Dimension(**_BOOSTING),
    },
    seconds=6.0,
    monotone=True,
)
CATBOOST = Family(
    "catboost",
    {"model_type": "catboost", "rounds_per_step": 10},
    {
        "CatBoost": (12, {"depth": 6, "l2_leaf_reg": 3.0, RATE: 0.1}),
        "CatBoost, shallow": (9, {"depth": 4, "l2_leaf_reg": 3.0, RATE: 0.1}),
    },
    package="catboost",
    max_steps=50,
    space={
        "depth": Dimension(low=2, high=8),
        "l2_leaf_reg": Dimension(low=1.0, high=30.0, log=True),
        RATE: Dimension(**_BOOSTING),
    },
    seconds=20.0,
    monotone=True,
)
EXTRA_TREES = Family(
    "sklearn",
    {"model_type": "extra_trees", "rounds_per_step": 200},
    {
        "extra trees": (17, {"min_samples_leaf": 1, "max_features": 0.5}),
        "extra trees, larger leaves": (5, {"min_samples_leaf": 5, "max_features": 1.0}),
    },
    space={
        "min_samples_leaf": Dimension(low=1, high=50, log=True),
        "max_features": Dimension(low=0.1, high=1.0),
    },
    seconds=10.0,
)
RANDOM_FOREST = Family(
    "sklearn",
    {"model_type": "random_forest", "rounds_per_step": 200},
    {"random forest": (20, {"min_samples_leaf": 1, "max_features": "sqrt"})},
    seconds=20.0,
)
HIST_BOOSTING = Family(
    "sklearn",
    {"model_type": "hist_boosting", "rounds_per_step": 10},
    {
        "histogram boosting": (7, {"max_leaf_nodes": 31, "min_samples_leaf": 20, RATE: 0.1}),
        "histogram boosting, few leaves": (
            14,
            {"max_leaf_nodes": 8, "min_samples_leaf": 5, "l2_regularization": 1.0, RATE: 0.1},
        ),
    },
    max_steps=50,
    space={
        "max_leaf_nodes": Dimension(low=4, high=127, log=True),
        "min_samples_leaf": Dimension(low=2, high=100, log=True),
        RATE: Dimension(**_BOOSTING),
    },
    seconds=10.0,
    monotone=True,
)
NEIGHBORS = Family(
    "sklearn",
    {"model_type": "knn"},
    {"nearest neighbors": (19, {"n_neighbors": 15, "weights": "distance"})},
    seconds=5.0,
    weighs=False,
)
MLP = Family(
    "pytorch_tables",
    {"model_type": "mlp"},
    {"multilayer perceptron": (10, {"width": 128, "layers": 2, "dropout": 0.1, RATE: 1e-3})},
    package="torch",
    max_steps=50,
    space={
        "width": Dimension(low=32, high=512, log=True),
        "dropout": Dimension(low=0.0, high=0.5),
        RATE: Dimension(low=1e-4, high=1e-2, log=True),
    },
    seconds=40.0,
)
TABM = Family(
    "pytorch_tables",
    {"model_type": "tabm"},
    {"TabM": (8, {"width": 128, "layers": 2, "dropout": 0.1, RATE: 2e-3})},
    package="torch",
    max_steps=50,
    seconds=300.0,
)
_STATISTICAL: Final[dict[str, Any]] = {
    "framework": "statsforecast",
    "package": "statsforecast",
    "tasks": SERIES,
    "reads_covariates": False,
}
SEASONAL_NAIVE = Family(
    config={"model_type": "seasonal_naive"},
    entries={"seasonal naive": (0, {})},
    interpretable=True,
    **_STATISTICAL,
)
THETA = Family(
    config={"model_type": "auto_theta"},
    entries={"Theta": (1, {})},
    seconds=1e3,
    least_times=5,
    **_STATISTICAL,
)
ETS = Family(
    config={"model_type": "auto_ets"},
    entries={"ETS": (3, {})},
    seconds=2e3,
    least_times=8,
    **_STATISTICAL,
)
ARIMA = Family(
    config={"model_type": "auto_arima"}, entries={"ARIMA": (5, {})}, seconds=1e4, **_STATISTICAL
)
SERIES_LIGHTGBM = Family(
    "mlforecast",
    {"model_type": "lightgbm", "rounds_per_step": 10},
    {
        DEFAULT: (2, {"num_leaves": 31, "min_data_in_leaf": 20, RATE: 0.1}),
        "LightGBM, few leaves": (4, {"num_leaves": 7, "min_data_in_leaf": 5, RATE: 0.05}),
    },
    package="mlforecast",
    max_steps=50,
    space={
        "num_leaves": Dimension(low=4, high=63, log=True),
        "min_data_in_leaf": Dimension(low=2, high=50, log=True),
        RATE: Dimension(**_BOOSTING),
    },
    seconds=100.0,
    tasks=SERIES,
)
SERIES_NETWORK = Family(
    "pytorch",
    {"model_type": "mlp"},
    {"network": (6, {"width": 64, "blocks": 2, RATE: 1e-3})},
    package="torch",
    max_steps=300,
    seconds=1e3,
    tasks=SERIES,
    eval_steps=20,
)
