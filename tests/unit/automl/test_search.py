"""What a search tries after its portfolio, compared with Optuna itself."""

from __future__ import annotations

import dataclasses
import math

import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import create_trial

from steadytrain.components.automl.board import Board, Row
from steadytrain.components.automl.design import as_automl
from steadytrain.components.automl.plan import lines, plan
from steadytrain.components.automl.portfolio import (
    DEFAULT,
    RATE,
    Configuration,
    families,
    portfolio,
)
from steadytrain.components.automl.report import _quality_by_latency
from steadytrain.components.automl.results import verdicts
from steadytrain.components.automl.time_limit import UNIT_SECONDS
from steadytrain.components.shared.artifact import Artifact
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.records import Interval
from steadytrain.components.tune.space import seed_of
from steadytrain.pipelines import searches

from support.searched import simulated

FOLDS, AFTER = 8, 6


@pytest.fixture(scope="module")
def config():
    settings = ["automl.quality=best", "data.source=[none.csv]", "data.target=y", "tune.seed=7"]
    return as_automl(load("tabular", settings))


def loss(configuration):
    """Boosting leads, LightGBM before XGBoost, each with a best learning rate."""
    base = {"lightgbm": 0.1, "xgboost": 0.2}.get(configuration.family, 1.0)
    rate = configuration.settings.get(RATE, 0.1)
    return base + 0.05 * abs(math.log(rate / 0.06))


def searched(config, loss=loss, after=AFTER):
    return simulated(config, loss, after)


def by_optuna(known, place, config):
    """Ask Optuna's own TPE for the configuration at a place, given those before the last one."""
    family = ("lightgbm", "xgboost")[(place - len(portfolio(config)[0])) % 2]
    space = families()[family].space
    whole = {"num_leaves", "min_data_in_leaf", "max_depth"}
    # Optuna draws in the order of the names.
    field = {name: f"training.{name}" if name == RATE else f"model.config.{name}" for name in space}
    spread = {
        name: (IntDistribution if name in whole else FloatDistribution)(
            *(int(end) if name in whole else end for end in (item.low, item.high)), log=item.log
        )
        for name, item in space.items()
    }
    sampler = optuna.samplers.TPESampler(seed=seed_of(7, place), n_startup_trials=3)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    for item in known[: place - 1]:
        if item.family == family:
            names = [name for name in spread if name in item.settings]
            params = {field[name]: item.settings[name] for name in names}
            spreads = {field[name]: spread[name] for name in names}
            study.add_trial(create_trial(params=params, distributions=spreads, value=loss(item)))
    trial = study.ask()
    return family, {name: trial._suggest(field[name], item) for name, item in spread.items()}


def test_monotone_outputs_are_kept_by_all_configurations_or_they_are_left_out(config):
    monotone = {"x": 1, "y": -1}
    model = config.model.model_copy(
        update={"config": {"model_type": "lightgbm", "monotone": monotone}}
    )
    kept = config.model_copy(update={"model": model})
    known, skipped = portfolio(kept)
    assert {item.family for item in known} == {"lightgbm", "xgboost", "catboost", "hist_boosting"}
    assert all(
        item.fields(families()[item.family])["model.config"]["monotone"] == monotone
        for item in known
    )
    assert skipped["linear"] == "its models cannot keep model.config.monotone"
    assert {"dummy", "TabM", "nearest neighbors"} < skipped.keys()


@pytest.mark.parametrize("field", ["data.columns.weight=w", "training.class_weights.kind=balanced"])
def test_families_that_cannot_weigh_records_are_left_out_if_they_have_to(field):
    given = ["data.source=[none.csv]", "data.target=y"]
    assert "nearest neighbors" not in portfolio(load("tabular", given))[1]
    assert portfolio(load("tabular", [*given, field]))[1] == {
        "nearest neighbors": "its models cannot weigh records"
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_suggestions_keep_monotone_outputs(config):
    model = config.model.model_copy(update={"config": {"monotone": {"x": 1}}})
    kept = config.model_copy(update={"model": model})
    known, design = searched(kept)
    for item in design.configurations[len(known) :]:
        assert item.settings["monotone"] == {"x": 1}
        assert item.family in ("lightgbm", "xgboost")


@pytest.mark.parametrize("monotone", ["up", {"x": 2}, {"x": True}, ["x"]])
def test_monotone_outputs_that_are_none_are_refused_before_any_unit(monotone):
    source = {"data.source": ["none.csv"], "data.target": "y"}
    given = load(
        "tabular", {**source, "model.config": {"model_type": "lightgbm", "monotone": monotone}}
    )
    with pytest.raises(BadInput, match=r"model\.config\.monotone = "):
        as_automl(given)


def test_monotone_outputs_that_no_family_keeps_are_refused_by_name():
    rising = {"model_type": "lightgbm", "monotone": {"x": 1}}
    given = load("series", {"data.series.covariates": ["x"], "model.config": rising})
    with pytest.raises(BadInput, match=r"monotone = {'x': 1}: no family of models for forecasting"):
        as_automl(given)
    limits = {"automl.constraints.interpretable": True, "model.config": rising}
    given = load("tabular", {"data.source": ["none.csv"], "data.target": "y", **limits})
    with pytest.raises(BadInput, match=r"automl\.constraints and model\.config\.monotone leave no"):
        as_automl(given)


def table(folder, rows=40, columns=2):
    names = [f"c{number}" for number in range(columns)]
    lines = [",".join([*names, "y"])]
    lines += [
        ",".join([*(str((row * 7 + n) % 13) for n in range(columns)), "ab"[row % 2]])
        for row in range(rows)
    ]
    (folder / "t.csv").write_text("\n".join(lines))
    return {"data.source": [str(folder / "t.csv")], "data.target": "y", "output": str(folder)}


def test_fields_that_a_search_chooses_are_named_as_not_used(tmp_path):
    own = {"training.learning_rate": 0.5, "model.config.num_leaves": 7, "training.seed": 3}
    config, remarks = searches.searched(
        "", {**table(tmp_path), **own, "model.framework": "xgboost"}
    )
    (said,) = [it for it in remarks if it.startswith("not used: ")]
    assert said.startswith(
        "not used: model.config.num_leaves, model.framework, training.learning_rate. "
    )
    monotone = {"model.config.monotone": {"c0": 1}}
    config, remarks = searches.searched("", {**table(tmp_path), **monotone})
    assert "not used" not in str(remarks)
    assert as_automl(config).model.config["monotone"] == {"c0": 1}
    assert "not used" not in str(searches.searched("vote", {"output": str(tmp_path)})[1])
    path = tmp_path / "own.yaml"
    path.write_text("training: {metric_for_best_model: accuracy, greater_is_better: true}")
    config, remarks = searches.searched(path, table(tmp_path))
    assert "not used: training.greater_is_better, training.metric_for_best_model. " in str(remarks)
    # The board counts the steps of the lowest loss.
    assert as_automl(config).training.metric_for_best_model is None


def test_a_search_does_not_spend_the_budget_of_a_study(tmp_path):
    others = {
        "tune.budget": {"hours": 0.01, "steps": 10, "parallel": 3},
        "tune.objective": {"metric": "accuracy"},
        "cross_validation": {"folds": 3, "repeats": 2},
        "tune.seed": 4,
    }
    config, remarks = searches.searched("", {**table(tmp_path), **others})
    (said,) = [it for it in remarks if it.startswith("not used: ")]
    assert said.startswith(
        "not used: cross_validation.folds, cross_validation.repeats, tune.budget.hours, "
        "tune.budget.parallel, tune.budget.steps, tune.objective.metric. "
    )
    search, plain = as_automl(config), as_automl(searches.searched("", table(tmp_path))[0])
    assert search.tune == plain.tune.model_copy(update={"seed": 4})
    assert search.cross_validation == plain.cross_validation


def test_units_of_a_table_need_no_gpus(tmp_path):
    config, _ = searches.searched("", {**table(tmp_path), "compute.device": "auto"})
    assert as_automl(config).compute.device == "cpu"


@pytest.mark.parametrize("section", ["automl", "tune"])
def test_limit_on_the_cost_needs_a_price(section):
    given = {"data.source": ["none.csv"], "data.target": "y", f"{section}.budget.usd": 1.5}
    with pytest.raises(
        ConfigError, match=rf"{section}\.budget\.usd = 1\.5: the price of an hour is"
    ):
        load("tabular", given)
    with pytest.raises(ConfigError, match="an hour costs nothing, so it limits nothing"):
        load("tabular", {**given, "compute.price_per_hour": 0})
    assert load("tabular", {**given, "compute.price_per_hour": 2}).compute.price_per_hour == 2


def test_planned_cost_is_that_of_all_units_and_grows_with_columns(tmp_path):
    def planned(**more):
        price = {"compute.price_per_hour": 36, "automl.quality": "fast"}
        return plan(as_automl(searches.searched("", {**table(tmp_path), **price, **more})[0]))

    one = planned(**{"automl.budget.parallel": 1})
    four = planned(**{"automl.budget.parallel": 4})
    assert one.usd == four.usd == pytest.approx(one.training_seconds / 100)
    assert (one.seconds, four.seconds) == (one.training_seconds, four.training_seconds / 4)
    few, _ = searches.searched(
        "", {**table(tmp_path), "automl.budget.units": 11, "automl.quality": "fast"}
    )
    few = as_automl(few)
    text = "\n".join(lines(few, plan(few)))
    assert "portfolio   dummy\nportfolio   linear\nnot begun   LightGBM, its defaults: the" in text
    table(tmp_path, columns=200)
    config, _ = searches.searched(
        "", {"data.source": [str(tmp_path / "t.csv")], "data.target": "y", "automl.quality": "fast"}
    )
    wide = plan(as_automl(config))
    learning = one.training_seconds - one.units * UNIT_SECONDS
    # Some records of two columns are equal, and left out.
    assert (wide.training_seconds - wide.units * UNIT_SECONDS) / wide.records == pytest.approx(
        100 * learning / one.records
    )
    text = "\n".join(lines(config, wide))
    assert "cost        unknown: compute.price_per_hour is not set" in text


@pytest.mark.parametrize(
    ("better", "skipped", "said"),
    [
        (
            Interval(value=0.2, low=0.1, high=0.3),
            {},
            "yes: its loss is lower by 0.2000 (0.1000 to 0.3",
        ),
        (
            Interval(value=0.1, low=-0.1, high=0.3),
            {},
            "no: its loss is lower by 0.1000 (-0.1000 to 0.3",
        ),
        (
            Interval(value=-0.2, low=-0.3, high=-0.1),
            {},
            "no, it is worse: its loss is higher by 0.2000 (0.1000 to 0.3000)",
        ),
        (
            Interval(value=0.2, low=math.nan, high=math.nan),
            {},
            "undecided: its loss is lower by 0.2",
        ),
        (None, {DEFAULT: "failed (bad_input): why"}, "not compared: failed (bad_input): why"),
    ],
)
def test_board_says_whether_the_winner_is_better_than_lightgbm(better, skipped, said):
    row = Row(Configuration("linear", "linear", {}), 1.0, 0.1, {}, 1.0, [], [1], "")
    found = Board([row], {0: 1}, 1.0, 1.1, better, skipped)
    words = dict(verdicts(found))["better than default LightGBM by more than chance?"]
    assert words.startswith(said)


def measured(name, latency, score):
    one = Artifact(latency_p50_ms=latency, latency_p99_ms=latency, memory_mb=1.0, size_mb=1.0)
    return Row(Configuration(name, "linear", {}), score, 0.1, {}, 1.0, [one], [1], "")


def test_pareto_front_has_the_ensemble_too():
    rows = [measured("a", 3.0, 0.4), measured("b", 1.0, 0.5), measured("c", 2.0, 0.6)]
    board = Board(rows, {0: 1, 1: 2}, 0.3, 0.35, None, {})
    figure = _quality_by_latency(board)
    assert "The line is the Pareto front: b, a, the ensemble." in figure.caption
    assert "the ensemble: loss 0.3000, 4 ms" in figure.svg
    alone = _quality_by_latency(dataclasses.replace(board, weights={0: 1}))
    assert "The line is the Pareto front: b, a." in alone.caption


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_portfolio_is_followed_by_what_optuna_suggests_in_the_two_leading_families(config):
    known, design = searched(config)
    found = design.configurations
    assert [item.name for item in found[: len(known)]] == [item.name for item in known]
    assert len(found) == len(known) + AFTER
    for place in range(len(known), len(found)):
        family, settings = by_optuna(found, place, config)
        assert found[place].family == family
        assert found[place].settings == pytest.approx(settings)
    again = searched(config)[1].configurations
    assert [item.settings for item in again] == [item.settings for item in found]
    other = config.model_copy(update={"tune": config.tune.model_copy(update={"seed": 8})})
    assert [item.settings for item in searched(other)[1].configurations] != [
        item.settings for item in found
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_family_whose_models_miss_a_limit_does_not_lead(config):
    def limited(item):
        """LightGBM would lead, and XGBoost keeps the limits with shallow trees only."""
        shallow = item.family == "xgboost" and item.settings["max_depth"] <= 4
        fit = shallow or item.family not in ("lightgbm", "xgboost")
        return loss(item) if fit else math.inf

    known, design = searched(config, limited, after=2)
    found = [item.family for item in design.configurations[len(known) :]]
    assert found == ["xgboost", "linear"]
    none = searched(config, lambda item: math.inf, after=0)[1]
    assert none.suggest(len(known) * FOLDS, {}, lambda _: True) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_suggestion_is_expected_to_take_as_long_as_its_family():
    limits = ["automl.quality=best", "automl.budget.hours=1", "automl.budget.parallel=1"]
    config = as_automl(load("tabular", [*limits, "data.source=[none.csv]", "data.target=y"]))
    known, design = searched(config, after=0)
    for trial in design._history.trials:
        slow = known[trial.number // FOLDS].name == "TabM"
        trial.began, trial.wall = 1.0 + 2.0 * trial.number, 60.0 if slow else 2.0
    number = len(known) * FOLDS
    params = design.suggest(number, {}, lambda _: True)
    assert params["model.framework"] == "lightgbm"
    # Its folds take 16 seconds, and the winner 26.
    assert design.skipped(number, params, 3600.0 - 43) == ""
    assert "its folds take about 16 s" in design.skipped(number, params, 3600.0 - 41)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_suggestion_waits_for_all_configurations_but_the_one_before_it(config):
    known, design = searched(config)
    first = (len(known) + 1) * FOLDS
    history = design._history
    history.running[len(known) * FOLDS + 3] = history.trials[len(known) * FOLDS + 3]
    assert design.ready(first)
    history.running[len(known) * FOLDS - 1] = history.trials[len(known) * FOLDS - 1]
    assert not design.ready(first)
