"""What a search of forecasts has of its own: its portfolio, its loss, and its task."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.automl import board
from steadytrain.components.automl.board import Board, Row, alone_in
from steadytrain.components.automl.calibration import promised
from steadytrain.components.automl.design import (
    SearchDesign,
    as_automl,
    first_configurations,
)
from steadytrain.components.automl.ensemble import SINGLE, chosen
from steadytrain.components.automl.plan import plan
from steadytrain.components.automl.portfolio import DEFAULT, Configuration, families, portfolio
from steadytrain.components.automl.results import best_config
from steadytrain.components.automl.time_limit import TimeLimit
from steadytrain.components.automl.unit_scores import forecasts_of, out_of_fold
from steadytrain.components.series.learner import StatisticalLearner
from steadytrain.components.series.scoring import SeriesPackager
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tune.history import Trial
from steadytrain.pipelines.searches import searched

from support.series import FIRMS, firms, prepared
from support.tables import write_csv

FIELDS = {"data.series.time": "year", "data.series.column": "firm", "data.series.horizon": 2}
TABLE = load("tabular", ["data.source=[t.csv]", "data.target=y"])


def of_firms(*more):
    data = ("data.source=[t.csv]", "data.target=invest", "data.series={}")
    return load("series", [*data, *(f"{name}={it}" for name, it in FIELDS.items()), *more])


def test_each_task_has_the_families_that_are_for_it():
    series, skipped = portfolio(of_firms())
    assert [item.name for item in series] == [
        "seasonal naive",
        "Theta",
        DEFAULT,
        "ETS",
        "LightGBM, few leaves",
        "ARIMA",
        "network",
    ]
    assert not skipped
    tables, _ = portfolio(TABLE)
    assert not {item.family for item in series} & {item.family for item in tables}
    only, left_out = portfolio(of_firms("automl.constraints.interpretable=true"))
    assert [item.name for item in only] == ["seasonal naive"]
    assert len(left_out) == 6
    known, without = portfolio(of_firms("data.series.covariates=[price]"))
    assert [item.name for item in known] == [DEFAULT, "LightGBM, few leaves", "network"]
    assert {*without.values()} == {"it learns from no data.series.covariates"}
    for item in series:
        fields = item.fields(families()[item.family])
        assert (fields["training.early_stopping_patience"] is None) == (
            fields["training.max_steps"] == 1 or item.name == DEFAULT
        )


def scores(predicted, truth, scale):
    """Return the scores of forecasts, in the columns that the board reads."""
    apart = np.abs(np.array(predicted) - truth)
    return pa.table(
        {
            "id": [str(n) for n in range(len(truth))],
            "group": ["a", "a", "b", "b"],
            "series": ["a", "a", "b", "b"],
            "fold": [0, 1, 0, 1],
            "target": truth,
            "predicted": np.array(predicted, np.float64),
            "absolute_error": apart,
            "scaled_error": apart / scale,
        }
    )


def test_forecasts_are_compared_by_their_scaled_errors():
    truth, scale = np.array([1.0, 2.0, 300.0, 400.0]), np.array([1.0, 1.0, 100.0, 100.0])
    # The first is exact where the scale is small, which another one shows.
    near, far = [1.0, 2.0, 380.0, 480.0], [3.0, 4.0, 310.0, 410.0]
    found = out_of_fold([scores(near, truth, scale), scores(far, truth, scale)])
    assert found.scale.tolist() == scale.tolist()
    losses = found.losses(found.predicted).mean(axis=1)
    assert losses == pytest.approx([0.4, 1.05])
    assert chosen(found, selection=SINGLE) == {0: 1}
    half = found.only(np.array([0, 2]))
    assert half.losses(half.predicted[1]).tolist() == pytest.approx([2.0, 0.1])


def test_the_promise_of_forecasts_is_of_choices_on_the_other_times():
    # Each is best on one of two folds, and both series are in each.
    truth, ones = np.array([1.0, 2.0, 3.0, 4.0]), np.ones(4)
    early, late = (truth + np.array(off * 2) for off in ([0.1, 0.9], [0.8, 0.2]))
    found = out_of_fold([scores(early, truth, ones), scores(late, truth, ones)])
    assert promised(found, [], "likeliest", SINGLE).losses.tolist() == pytest.approx(
        [0.8, 0.9, 0.8, 0.9]
    )


@pytest.mark.parametrize("name", ["", "co2"])
def test_times_of_one_series_are_no_independent_evidence(name):
    """Whether its column is named or there is none: what counts are the origins."""
    horizon, folds = 4, 3
    rows = horizon * folds
    truth = np.arange(rows, dtype=np.float64)
    # Errors grow with the time ahead.
    off = np.tile([0.1, 0.2, 0.3, 0.4], folds)
    table = pa.table(
        {
            "id": [f"{n:02d}" for n in range(rows)],
            "group": [name or None] * rows,
            "series": [name] * rows,
            "fold": np.repeat(np.arange(folds), horizon),
            "ordinal": np.arange(rows, dtype=np.float64),
            "target": truth,
            "predicted": truth + off,
            "low": truth,
            "high": truth,
            "absolute_error": off,
            "scaled_error": off,
        }
    )
    found = out_of_fold([table, table])
    assert found.units.tolist() == found.fold.tolist()
    several = forecasts_of([table, table], {0: 1, 1: 1}, found)
    widths = several["high"].to_numpy() - several["low"].to_numpy()
    assert widths.reshape(folds, horizon) == pytest.approx(
        np.tile([0.2, 0.4, 0.6, 0.8], (folds, 1))
    )
    better = board._difference(off, found)
    assert (better.value, math.isnan(better.low)) == (pytest.approx(0.25), True)


def test_series_are_a_task_that_needs_no_shares(tmp_path):
    firms().to_csv(tmp_path / "table.csv", index=False)
    given = {"data.source": [str(tmp_path / "table.csv")], "data.target": "invest", **FIELDS}
    config, remarks = searched("", {**given, "output": str(tmp_path / "output")})
    assert config.data.task == "forecasting"
    assert "data.series is set" in str(remarks)
    search = as_automl(config)
    assert (search.cross_validation.folds, search.cross_validation.repeats) == (3, 1)
    assert search.tune.budget.trials == 21
    repeated, _ = searched("", {**given, "automl.repeats": 2})
    with pytest.raises(BadInput, match="follow each other in time"):
        as_automl(repeated)


@pytest.mark.parametrize("weights", [{0: 2, 1: 1, 2: 3}, {1: 1}])
def test_the_winner_is_trained_again_as_one_model(tmp_path, weights):
    firms().to_csv(tmp_path / "table.csv", index=False)
    given = {"data.source": [str(tmp_path / "table.csv")], "data.target": "invest", **FIELDS}
    config, _ = searched("", {**given, "output": str(tmp_path / "output")})
    known = {item.name: item for item in portfolio(of_firms())[0]}
    trained = {"Theta": [1, 1, 1], "LightGBM, few leaves": [9, 4, 6], "network": [80, 40, 60]}
    rows = [Row(known[name], 1.0, 0.1, {}, 1.0, [], it, "") for name, it in trained.items()]
    found = Board(rows, weights, 1.0, 1.2, None, {})
    best = best_config(SimpleNamespace(config=as_automl(config)), found)
    check_task(best)
    assert (best.gate.promised, best.gate.compared) == (1.2, 3)
    assert (best.model.framework, best.training.max_steps) == ("ensemble", len(weights))
    assert best.training.early_stopping_patience is None
    if len(weights) == 1:
        (boosted,) = best.model.config["members"]
        assert (boosted["framework"], boosted["max_steps"]) == ("mlforecast", 6)
        return
    theta, boosted, network = best.model.config["members"]
    assert (theta["weight"], theta["framework"], theta["max_steps"]) == (2, "statsforecast", 1)
    assert (boosted["weight"], boosted["framework"], boosted["max_steps"]) == (1, "mlforecast", 6)
    assert "schedule_steps" not in boosted
    # It stops where the units' networks were best, on their schedule.
    assert (network["framework"], network["max_steps"], network["schedule_steps"]) == (
        *("pytorch", 60, 300),
    )


def test_forecasts_by_a_packages_own_framework_are_trained_as_in_the_search(tmp_path, monkeypatch):
    # As if PyTorch were one.
    monkeypatch.setattr(board, "LEARNERS", {})
    firms().to_csv(tmp_path / "table.csv", index=False)
    given = {"data.source": [str(tmp_path / "table.csv")], "data.target": "invest", **FIELDS}
    config, _ = searched("", {**given, "output": str(tmp_path / "output")})
    known = {item.name: item for item in portfolio(of_firms())[0]}
    row = Row(known["network"], 1.0, 0.1, {}, 1.0, [], [80, 40, 60], "")
    found = Board([row], {0: 1}, 1.0, 1.2, None, {})
    best = best_config(SimpleNamespace(config=as_automl(config)), found)
    assert (best.model.framework, best.training.max_steps) == ("pytorch", 300)
    assert best.training.early_stopping_patience == 3
    assert (best.gate.promised, best.gate.compared) == (1.2, 1)


def test_time_is_kept_for_a_winner_that_learns_twice(tmp_path):
    firms().to_csv(tmp_path / "table.csv", index=False)
    given = {"data.source": [str(tmp_path / "table.csv")], "data.target": "invest", **FIELDS}
    config, _ = searched("", {**given, "automl.budget.hours": 1, "output": str(tmp_path)})
    series = as_automl(config)
    data = series.data.model_copy(update={"task": "tabular_regression"})
    # After the first unit, which waits for the data, those of the network learn for 100 s.
    trials = [
        Trial(n, {}, 1, status="finished", began=2.0 * (n > 0), wall=102.0 if n > 2 else 2.0)
        for n in range(6)
    ]
    history = SimpleNamespace(trials=trials, running={})
    costs = [("seasonal_naive", 1.0), ("series_network", 1e3)]

    def ends(search):
        limit = TimeLimit(search, history, lambda: costs, lambda: [1])
        return next(second for second in range(3600) if limit.out_of_time(second))

    once = ends(series.model_copy(update={"data": data}))
    assert once - ends(series) == pytest.approx(100 * 3 / 2, abs=1)


def test_a_packages_own_framework_is_in_no_ensemble_of_forecasts(monkeypatch):
    known, _ = portfolio(of_firms())
    assert alone_in(of_firms(), known) == []
    own = {**families(), "odd": replace(families()["series_network"], framework="odd")}
    monkeypatch.setattr(board, "families", lambda: own)
    known.append(Configuration("odd", "odd", {}))
    assert alone_in(of_firms(), known) == [len(known) - 1]
    assert alone_in(TABLE, known) == []


def numbered(times):
    """Return two series of numbers, one of them longer."""
    random = np.random.default_rng(0)
    return [
        {"firm": name, "year": year, "invest": float(10 + random.normal())}
        for name, count in (("a", times), ("b", times + 9))
        for year in range(count)
    ]


def test_values_whose_squares_are_too_large_are_refused_before_any_unit(tmp_path):
    large = [{**record, "invest": 1e200 * (1 + record["invest"])} for record in numbered(20)]
    given = {"data.source": [str(write_csv(tmp_path, large))], "data.target": "invest"}
    config, _ = searched("", {**given, **FIELDS, "data.series.horizon": 1})
    with pytest.raises(DataError, match=r"'invest' reach from .* too large to compute with"):
        first_configurations(as_automl(config))


@pytest.mark.parametrize("times", [4, 7, 8])
def test_families_that_need_more_times_have_units_that_do_not_start(tmp_path, times):
    # Before what the first fold learns from come its validation and test times, and two sides.
    source = write_csv(tmp_path, numbered(times + 6))
    given = {"data.source": [str(source)], "data.target": "invest", "output": str(tmp_path)}
    config, _ = searched("", {**given, **FIELDS, "data.series.horizon": 1})
    search = as_automl(config)
    queued = first_configurations(search)
    unfit = {item["name"]: item["unfit"] for item in queued if "unfit" in item}
    known = {"Theta": 5, "ETS": 8}
    assert [*unfit] == [name for name, least in known.items() if times < least]
    for name, reason in unfit.items():
        assert f"needs {known[name]} times of each series" in reason
        assert f"shortest one from {times}" in reason
    found = plan(search)
    assert {name: found.skipped[name] for name in unfit} == unfit
    assert found.units == search.tune.budget.trials - 3 * len(unfit) == 3 * len(found.known)
    # A number of units is that of units which start.
    few, _ = searched("", {**given, **FIELDS, "data.series.horizon": 1, "automl.budget.units": 9})
    assert plan(as_automl(few)).units == 9
    history = SimpleNamespace(queued=queued, trials=[], running={})
    design = SearchDesign(search, history, lambda _: None)
    trained = []
    while params := design.suggest(len(history.trials), {}, lambda _: True):
        assert not design.skipped(len(history.trials), params, 0.0)
        trained.append(params["model.config"]["model_type"])
        history.trials.append(Trial(len(history.trials), params, 1, status="finished"))
    assert len(trained) == found.units
    assert ("auto_ets" in trained) == ("ETS" not in unfit)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, item in families().items() if item.least_times > 1]
)
def test_a_family_learns_from_the_fewest_times_that_it_declares(tmp_path, name):
    family = families()[name]
    fields = [*FIRMS, "data.series.horizon=1", f"model.config={json.dumps(dict(family.config))}"]
    for times in (family.least_times - 1, family.least_times):
        folder = tmp_path / str(times)
        folder.mkdir()
        config, data = prepared(folder, numbered(times + 2), *fields)
        if times < family.least_times:
            with pytest.raises(DataError, match=f"1 of 2 series are too short .* 'a' has {times}"):
                StatisticalLearner(config, data)
            continue
        learner = StatisticalLearner(config, data)
        assert np.isfinite(learner.learn([], learning_rate_scale=1.0).loss)
        assert np.isfinite(learner.validate([])["loss"])


@pytest.mark.slow
def test_an_exported_model_is_measured(tmp_path):
    config, data = prepared(tmp_path, firms(), *FIRMS, "model.config={model_type: seasonal_naive}")
    (tmp_path / "model").mkdir()
    StatisticalLearner(config, data).export(tmp_path / "model")
    found = SeriesPackager(config, data).measured(tmp_path / "model", pa.table({}))
    size = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    assert found.size_mb == pytest.approx(size / 1e6, abs=1e-4)
    assert 0 < found.latency_p50_ms <= found.latency_p99_ms
