"""What a search tries after its portfolio, compared with Optuna itself."""

from __future__ import annotations

import math
from types import SimpleNamespace

import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import create_trial

from steadytrain.components.automl.design import SearchDesign, as_automl
from steadytrain.components.automl.portfolio import RATE, families, portfolio
from steadytrain.components.shared.config import load
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.space import seed_of

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
    """Let a search suggest and end all its units, one after another; return its configurations."""
    known, _ = portfolio(config.automl.constraints)
    history = SimpleNamespace(queued=[item.as_plain() for item in known], trials=[], running={})
    design = SearchDesign(config, history, lambda place: loss(design.configurations[place]))
    for number in range((len(known) + after) * FOLDS):
        assert design.ready(number)
        params = design.suggest(number, {}, lambda _: True)
        history.trials.append(Trial(number, params, 1, status="finished"))
    return known, design


def by_optuna(known, place, config):
    """Ask Optuna's own TPE for the configuration at a place, given those before the last one."""
    family = ("lightgbm", "xgboost")[(place - len(portfolio(config.automl.constraints)[0])) % 2]
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
