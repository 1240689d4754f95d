"""Boosted trees of series are those of mlforecast; covariates, settings and intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from steadytrain.components.series.boosting import BoostingLearner, interval_widths
from steadytrain.components.series.errors import read_series, read_values
from steadytrain.components.series.model import Calendar, load
from steadytrain.components.series.scoring import SeriesScorer
from steadytrain.components.shared.errors import BadInput, ConfigError, DataError

from support.series import FIRMS, MONTHLY, by_mlforecast, firms, monthly, prepared, promoted

BOOSTED = ["model.framework=mlforecast", "model.config={model_type: lightgbm, min_data_in_leaf: 5}"]
PROMOTED = [
    "data.target=sold",
    "data.series={column: shop, time: day, horizon: 14, covariates: [price, holiday]}",
]
pytestmark = pytest.mark.slow


def trained(config, data, steps=4):
    learner = BoostingLearner(config, data)
    for _ in range(steps):
        learner.learn([], learning_rate_scale=1.0)
    return learner


def exported(learner, folder):
    folder.mkdir()
    learner.export(folder)
    return load(folder)


@pytest.mark.parametrize("kind", ["months", "firms", "covariates"])
def test_forecasts_are_those_of_mlforecast(tmp_path, kind):
    """mlforecast reads timestamps and adds its own date features."""
    if kind == "months":
        table, overrides, horizon = monthly(), MONTHLY, 12
        whole = table.rename(columns={"time": "ds", "co2": "y"}).assign(unique_id="")
        settings = {"lags": [*range(1, 13)], "windows": [12], "differences": [12]}
        dates, names = "MS", ["month"]
    elif kind == "firms":
        table, overrides, horizon = firms(), FIRMS, 3
        whole = table.rename(columns={"firm": "unique_id", "year": "ds", "invest": "y"})
        settings = {"lags": [1, 2, 3], "windows": [3], "differences": [1]}
        dates, names = 1, None
    else:
        table, overrides, horizon = promoted(), PROMOTED, 14
        whole = table.rename(columns={"shop": "unique_id", "day": "ds", "sold": "y"})
        settings = {"lags": [*range(1, 8)], "windows": [7], "differences": []}
        dates, names = "D", ["month", "dayofweek"]
    whole["ds"] = whole["ds"].astype(int) if dates == 1 else pd.to_datetime(whole["ds"])
    whole = whole.sort_values(["unique_id", "ds"])
    config, data = prepared(tmp_path, table, *overrides, *BOOSTED)
    learner = trained(config, data)
    train = whole.groupby("unique_id").head(-horizon)
    expected = by_mlforecast(train, dates, names, horizon, **settings)
    found = learner.validate([])
    wrong = np.abs(expected["trees"] - expected["y"])
    assert found["mae"] == pytest.approx(wrong.mean(), rel=1e-6)
    assert found["rmse"] == pytest.approx(np.sqrt((wrong**2).mean()), rel=1e-6)
    if kind == "firms":
        from utilsforecast.losses import mase

        past = train.groupby("unique_id").head(-horizon)
        peers = mase(expected, ["trees"], seasonality=1, train_df=past)["trees"].mean()
        assert found["loss"] == pytest.approx(peers, rel=1e-6)


def test_a_resumed_model_is_the_same_to_the_last_bit(tmp_path):
    config, data = prepared(tmp_path, firms(), *FIRMS, *BOOSTED, "training.seed=3")
    whole = trained(config, data)
    half = trained(config, data, 2)
    resumed = BoostingLearner(config, data)
    resumed.restore({name: array.copy() for name, array in half.state().items()})
    for _ in range(2):
        resumed.learn([], learning_rate_scale=1.0)
    assert resumed.parameters == whole.parameters > 0
    models = [exported(one, tmp_path / name) for one, name in ((whole, "a"), (resumed, "b"))]
    assert models[0].trees == models[1].trees
    assert models[0].widths == models[1].widths


def test_future_covariates_change_forecasts_and_are_needed(tmp_path):
    table = promoted()
    config, data = prepared(tmp_path, table, *PROMOTED, *BOOSTED)
    assert read_series(data).covariates == ["price", "holiday"]
    learner = trained(config, data, 20)
    model = exported(learner, tmp_path / "model")
    records = table.astype({"day": str}).to_dict("records")
    last = max(record["day"] for record in records)
    days = [str(day.date()) for day in pd.date_range(last, periods=15)[1:]]

    def forecast(price, days=days, holiday=0.0):
        future = [
            {"shop": shop, "day": day, "price": price, "holiday": holiday, "sold": None}
            for shop in ("NA", "north", "south")
            for day in days
        ]
        return model.rows([*records, *future])

    low, high = forecast(1.0), forecast(3.0)
    assert [row["day"] for row in low] == days * 3
    assert [row["shop"] for row in low][::14] == ["NA", "north", "south"]
    # A lower price sells more, by construction.
    assert all(a["prediction"] > b["prediction"] for a, b in zip(low, high, strict=True))
    with pytest.raises(ValueError, match=rf"'NA' has no price, holiday at {days[-1]}; give a"):
        forecast(1.0, days[:-1])
    with pytest.raises(ValueError, match="no 'price'"):
        forecast(None)
    with pytest.raises(ValueError, match=r"'price' of record .* is inf"):
        forecast(float("inf"))
    scorer = SeriesScorer(config, data)
    assert scorer.score({"model": model}, _tested(data)).num_rows == 42


def _tested(data):
    import pyarrow as pa

    with pa.memory_map(str(data.path(data.test_records))) as source:
        return pa.ipc.open_file(source).read_all()


def test_intervals_are_quantiles_of_held_out_errors(tmp_path):
    config, data = prepared(tmp_path, firms(), *FIRMS, *BOOSTED)
    learner = trained(config, data)
    model = exported(learner, tmp_path / "model")
    # Of the last time ahead, each of eleven firms has one error: that of the validation.
    calendar = Calendar(**read_series(data).calendar)
    past, held_out = (read_values(data, calendar, side) for side in ("train", "validation"))
    from steadytrain.components.series.errors import errors

    scaled = errors(model, past, held_out)["scaled_error"]
    ends = {}
    for one in held_out:
        ends[one.series] = max(one.ordinal, ends.get(one.series, 0))
    last = [
        error
        for one, error in zip(held_out, scaled, strict=True)
        if one.ordinal == ends[one.series]
    ]
    # ceil(12 * 0.8) = 10
    assert model.widths[2] == pytest.approx(max(sorted(last)[9], model.widths[1]))
    assert model.widths == sorted(model.widths)
    assert interval_widths(model, past, held_out) == model.widths
    for row in model.rows(firms().to_dict("records")):
        assert row["quantile_0.1"] < row["prediction"] < row["quantile_0.9"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{model_type: xgboost}", "trains lightgbm"),
        ("{model_type: lightgbm, alpha: 1}", "no such setting"),
        ("{model_type: lightgbm, lags: [0]}", "model.config.lags has 0"),
        ("{model_type: lightgbm, lags: 3}", "no list"),
        ("{model_type: lightgbm, date_features: [month]}", "whole numbers are no dates"),
        ("{model_type: lightgbm, objective: binary}", "no such loss"),
        ("{model_type: lightgbm, rounds_per_step: 0}", "rounds_per_step has 0"),
        ("{model_type: lightgbm, differences: [40]}", "too short"),
        ("{model_type: lightgbm, num_leaves: 1}", "LightGBM refuses"),
    ],
)
def test_other_settings_are_refused(tmp_path, given, message):
    fields = ["model.framework=mlforecast", f"model.config={given}"]
    config, data = prepared(tmp_path, firms(), *FIRMS, *fields)
    with pytest.raises(BadInput, match=message):
        trained(config, data, 1)


def test_bad_covariates_are_errors(tmp_path):
    table = promoted()
    with pytest.raises(ConfigError, match="a column of its own"):
        prepared(tmp_path, table, *PROMOTED, "data.series.covariates=[sold]")
    with pytest.raises(DataError, match=r"no record has the column .*'cost'"):
        prepared(tmp_path, table, *PROMOTED, "data.series.covariates=[cost]")
    twice = pd.concat([table, table.iloc[[0]].assign(price=9.0)])
    with pytest.raises(DataError, match="two records at 2023-01-01, which differ in price"):
        prepared(tmp_path, twice, *PROMOTED)
    text = table.astype(object)
    text.loc[::2, "holiday"] = "xmas"
    with pytest.raises(DataError, match="wrong_type"):
        prepared(tmp_path, text, *PROMOTED)
