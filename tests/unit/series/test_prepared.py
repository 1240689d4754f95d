"""Series are checked and divided by time; what is wrong with them is an error or is counted."""

from __future__ import annotations

import json
import shutil
from datetime import datetime

import numpy as np
import pandas as pd
import pytest

from steadytrain.components.automl.design import as_automl
from steadytrain.components.preprocess.folds import preview_folds
from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.series.boosting import BoostingLearner
from steadytrain.components.series.errors import read_series, read_values
from steadytrain.components.series.model import Calendar
from steadytrain.components.shared.errors import ConfigError, DataError
from steadytrain.components.shared.left_out import in_one_line
from steadytrain.pipelines.early_checks import check_plugins
from steadytrain.pipelines.searches import searched

from support.series import FIRMS, MONTHLY, firms, monthly, prepared, series_config


def sides(data):
    calendar = Calendar(**read_series(data).calendar)
    return {
        side: {
            (one.series, calendar.text(one.ordinal)): one.value
            for one in read_values(data, calendar, side)
        }
        for side in ("train", "validation", "test")
    }


def warnings(data):
    return json.loads(data.path("card.json").read_text())["warnings"]


def test_the_last_times_of_every_series_are_held_out_in_any_order_of_rows(tmp_path):
    table = firms()
    # One firm ends earlier than the others.
    table = table[(table["firm"] != "US Steel") | (table["year"] < 1950)]
    _, data = prepared(tmp_path, table.sample(frac=1, random_state=0), *FIRMS)
    assert (data.learned_until, data.tested_from) == (("number", 1951.0), ("number", 1947.0))
    found = sides(data)
    for firm, values in table.groupby("firm"):
        years = sorted(values["year"])
        expected = {"test": years[-3:], "validation": years[-6:-3], "train": years[:-6]}
        for side, times in expected.items():
            assert sorted(time for name, time in found[side] if name == firm) == [
                str(int(year)) for year in times
            ]
    everything = {key: value for side in found.values() for key, value in side.items()}
    assert everything == {
        (row.firm, str(int(row.year))): row.invest for row in table.itertuples(index=False)
    }
    assert any("1 of 11 series end before 1954" in warning for warning in warnings(data))


def test_gaps_missing_values_and_repeated_rows_are_counted(tmp_path):
    table = monthly()
    table.loc[10, "co2"] = np.nan
    table = pd.concat([table.drop(index=20), table.iloc[[30]]])
    _, data = prepared(tmp_path, table, *MONTHLY)
    found = read_series(data)
    assert (found.frequency, found.season, found.gaps) == ("1 month", 12, 2)
    assert (found.first, found.last) == ("1990-01-01", "2001-12-01")
    assert sum(map(len, sides(data).values())) == 144 - 2
    card = json.loads(data.path("card.json").read_text())
    assert card["quarantine"] == {"missing_field": 1, "exact_duplicate": 1}
    assert any("2 times within the series have no value" in line for line in card["warnings"])


def test_gaps_that_no_memory_holds_are_refused(tmp_path):
    times = [*pd.date_range("2024-01-01", periods=3000, freq="min"), datetime(9999, 12, 31)]
    table = pd.DataFrame({"time": [time.isoformat() for time in times], "co2": range(len(times))})
    with pytest.raises(DataError, match="the series lacks 4,194,966,120 from 2024-01-01 to 9999"):
        prepared(tmp_path, table, *MONTHLY, "data.max_bad_share=1")


@pytest.mark.parametrize(
    ("frequency", "end"),
    [("D", "9999-12-28"), ("MS", "9999-11-01"), ("B", "9999-12-28"), ("h", "9999-12-31 20:00")],
)
def test_series_that_ends_where_no_date_follows_is_refused(tmp_path, frequency, end):
    times = pd.date_range(end=end, periods=400, freq=frequency, unit="s")
    table = pd.DataFrame({"time": [str(time) for time in times], "co2": range(len(times))})
    with pytest.raises(DataError, match="the series ends so late that its next 12 times"):
        prepared(tmp_path, table, *MONTHLY)


def changed(**values):
    table = monthly()
    for name, value in values.items():
        table[name] = value
    return table


def replaced(index, column, value):
    table = monthly().astype(object)
    table.loc[index, column] = value
    return table


@pytest.mark.parametrize(
    ("table", "overrides", "message"),
    [
        (changed(co2=7.0), MONTHLY, "each record|the same value at all times"),
        (monthly(3), MONTHLY, "too short for a horizon of 12 and a season of 12, which need 50"),
        (pd.concat([monthly(), changed(co2=1.0)]), MONTHLY, "two values at 1990-01-01"),
        (monthly().drop(index=range(40, 60)), MONTHLY, "20 of 144 times of the series"),
        (replaced(range(0, 144, 2), "time", "31.05.2024"), MONTHLY, "72 of 144 records"),
        (replaced(range(0, 144, 2), "co2", "inf"), MONTHLY, "72 of 144 records"),
        (
            replaced(3, "time", "1990-04-17"),
            MONTHLY,
            "not regular: nearly all are on day 1 of a month, and 1990-04-17 is not",
        ),
        (replaced(3, "time", "1990-04-01T00:00Z"), MONTHLY, "different kinds"),
        (
            firms(),
            ["data.target=invest", "data.series={time: year, horizon: 3}"],
            "two values at 19",
        ),
        (
            pd.concat([firms(), pd.DataFrame([{"firm": "New", "year": 1954, "invest": 1.0}])]),
            FIRMS,
            "1 of 12 series are too short.*'New' has 1 times",
        ),
    ],
)
def test_bad_series_are_errors(tmp_path, table, overrides, message):
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, table, *overrides)


def test_a_target_with_spaces_is_read_and_other_columns_are_named(tmp_path):
    table = monthly().rename(columns={"co2": "parts per million"})
    fields = ["data.series={time: time, horizon: 12}"]
    _, data = prepared(tmp_path, table, "data.target=parts per million", *fields)
    assert len(sides(data)["test"]) == 12
    with pytest.raises(DataError, match="the existing columns are parts per million, time"):
        preprocess(series_config(tmp_path / "table.csv", *MONTHLY, "run=other"))


def with_covariates(**columns):
    return firms().assign(price=1.5, **columns)


COVARIATES = [
    "data.target=invest",
    "data.series={column: firm, time: year, horizon: 3, covariates: [price]}",
    "model.framework=mlforecast",
    "model.config={model_type: lightgbm}",
]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_columns_that_nothing_reads_are_counted_by_name(tmp_path, suffix):
    table = with_covariates(size=7, region="east")
    path = tmp_path / f"table.{suffix}"
    {
        "csv": lambda: table.to_csv(path, index=False),
        "jsonl": lambda: table.to_json(path, orient="records", lines=True),
        "parquet": lambda: table.to_parquet(path),
    }[suffix]()
    data = preprocess(series_config(path, *COVARIATES, "data.format=auto"))
    card = json.loads(data.path("card.json").read_text())
    assert card["unused"] == {"size": 220, "region": 220}
    assert "not used: size (220 records), region (220 records)" in in_one_line(data, card)


def test_covariates_of_a_series_are_learned_and_categories_are_refused_by_name(tmp_path):
    sizes = {firm: float(ordinal) for ordinal, firm in enumerate(sorted(firms()["firm"].unique()))}
    table = firms().assign(price=lambda frame: frame["firm"].map(sizes))
    learner = BoostingLearner(*prepared(tmp_path, table, *COVARIATES))
    # Of 20 years, 14 are the training side.
    assert np.repeat([*sizes.values()], 14).tolist() in learner.matrix.T.tolist()
    table = with_covariates().assign(price="high")
    with pytest.raises(DataError, match="220 of 220") as caught:
        prepared(tmp_path, table, *COVARIATES, "run=other")
    assert "price is 'high', not a finite decimal number" in str(caught.value)
    assert "covariates are columns of numbers: give one of 0 and 1 for each" in str(caught.value)


@pytest.mark.parametrize(
    ("covariate", "evidence"),
    [
        (lambda sold: sold, "it is a linear function of the target (correlation 1.000000)"),
        (lambda sold: 7 - 100 * sold, "it is a linear function of the target (correlation 1.0"),
        (np.exp, "it is a monotone function of the target (rank correlation 1)"),
        (lambda sold: 1 / sold, "it is a monotone function of the target (rank correlation -1)"),
    ],
)
def test_a_covariate_that_gives_the_target_away_is_refused(tmp_path, covariate, evidence):
    table = firms().assign(price=lambda frame: covariate(frame["invest"] / 100))
    # What only the last times of a series have is not known of the training side.
    table.loc[table["year"] > 1950, "price"] = 0.5
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, table, *COVARIATES)
    assert "data.series.covariates names columns that give the target away" in str(caught.value)
    assert f"'price': {evidence}" in str(caught.value)
    assert "leave it out of data.series.covariates" in caught.value.remedy
    _, data = prepared(tmp_path, table, *COVARIATES, "data.allow_leaks=[price]", "run=other")
    assert read_series(data).covariates == ["price"]


def test_a_leak_that_is_allowed_is_a_covariate(tmp_path):
    config = series_config(tmp_path, *COVARIATES, "data.allow_leaks=[price]")
    assert config.data.allow_leaks == ["price"]
    with pytest.raises(ConfigError, match=r"(?s)data\.allow_leaks.*name only covariates"):
        series_config(tmp_path, *COVARIATES, "data.allow_leaks=[price, cost]")


@pytest.mark.parametrize("trend", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_covariates_that_tell_something_of_the_target_are_learned(tmp_path, seed, trend):
    rng, days = np.random.default_rng(seed), pd.date_range("2024-01-01", periods=120)
    season = np.sin(2 * np.pi * days.dayofweek / 7)
    columns = {
        "price": rng.choice([1.0, 2.0, 3.0], len(days)),
        "holiday": (rng.random(len(days)) < 0.1).astype(int),
        "weekend": (days.dayofweek >= 5).astype(int),
        "season": season,
        "day_number": np.arange(len(days)),
        "square": np.arange(len(days)) ** 2,
        "noise": rng.normal(size=len(days)),
    }
    # With a trend, the target rises each day, as the squares of the days do.
    noise = rng.random(len(days)) if trend else rng.normal(size=len(days))
    sold = 9 * trend * np.arange(len(days)) + 3 * season - columns["price"] / 3 + noise
    table = pd.DataFrame({"day": days.strftime("%Y-%m-%d"), "sold": sold, **columns})
    assert not trend or (np.diff(sold) > 0).all()
    covariates = f"{{time: day, horizon: 7, covariates: [{', '.join(columns)}]}}"
    fields = ["data.target=sold", f"data.series={covariates}", *COVARIATES[2:]]
    _, data = prepared(tmp_path, table, *fields)
    assert read_series(data).covariates == [*columns]


def test_files_that_say_test_count_like_all_others_and_a_warning_says_so(tmp_path):
    table = firms()
    (tmp_path / "data").mkdir()
    table[table["year"] < 1952].to_csv(tmp_path / "data" / "train.csv", index=False)
    table[table["year"] >= 1952].to_csv(tmp_path / "data" / "test.csv", index=False)
    config = series_config(tmp_path / "data", *FIRMS, f"output={tmp_path / 'output'}")
    found = preprocess(config)
    assert len(sides(found)["test"]) == 33
    assert sum(map(len, sides(found).values())) == 220
    assert any(
        "has a test split of 33 records, which count like all" in it for it in warnings(found)
    )


@pytest.mark.parametrize("field", ["data.test_source", "data.validation_source"])
def test_a_search_refuses_a_file_of_held_out_records_by_name(tmp_path, field):
    path = tmp_path / "table.csv"
    firms().to_csv(path, index=False)
    given = {"data.source": [str(path)], "data.target": "invest", "output": str(tmp_path)}
    series = {"column": "firm", "time": "year", "horizon": 2}
    other = str(shutil.copy(path, tmp_path / "other.csv"))
    config, _ = searched("", {**given, "data.series": series, field: [other]})
    with pytest.raises(ConfigError, match=rf"{field} = .* does not read it"):
        check_plugins(as_automl(config))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.test_source=[t.csv]"], "data.test_source = .* does not read it"),
        (["data.series={time: time}"], "data.series.horizon"),
        (["data.series={time: co2, horizon: 3}"], "needs a column of its own"),
        (["data.task=causal_lm", "data.target=null"], "data.series"),
        (["data.test_share=0.5"], "does not read it"),
        (["data.features=[a]"], "data.features"),
        (["cross_validation.repeats=2"], "follow each other in time"),
        (["model.framework=lightgbm"], "does not train data.task forecasting"),
        (["data.target=null"], "predicts a column"),
    ],
)
def test_settings_that_do_not_go_with_series_are_errors(tmp_path, overrides, message):
    from steadytrain.components.tasks.checks import check_task

    with pytest.raises(ConfigError, match=message):
        check_task(series_config(tmp_path / "table.csv", *MONTHLY, *overrides))


@pytest.mark.parametrize("fold", [0, 1])
def test_a_fold_sees_neither_its_test_side_nor_what_follows_it(tmp_path, fold):
    table = firms()
    folds = [f"cross_validation.fold={fold}", "cross_validation.folds=2"]
    _, data = prepared(tmp_path, table.sample(frac=1, random_state=0), *FIRMS, *folds)
    found = sides(data)
    # Three times are the test side and three the validation side; each fold has three of the rest.
    end = 14 - 3 * (1 - fold)
    for firm, values in table.groupby("firm"):
        years = [str(int(year)) for year in sorted(values["year"])]
        expected = {
            "train": years[: end - 6],
            "validation": years[end - 6 : end - 3],
            "test": years[end - 3 : end],
        }
        for side, times in expected.items():
            assert sorted(time for name, time in found[side] if name == firm) == times
    assert preview_folds(series_config(tmp_path / "table.csv", *FIRMS, *folds)).sizes == (33, 33)


def test_too_many_folds_are_an_error(tmp_path):
    folds = ["cross_validation.fold=0", "cross_validation.folds=4"]
    with pytest.raises(DataError, match=r"11 of 11 series are too short for 4 folds .* 18 times"):
        prepared(tmp_path, firms(), *FIRMS, *folds)
    table = firms()
    table.loc[(table["firm"] == "US Steel") & (table["year"] < 1945), "invest"] = 5.0
    folds[1] = "cross_validation.folds=2"
    with pytest.raises(DataError, match=r"1 of 11 series have the same value .*'US Steel'"):
        prepared(tmp_path, table, *FIRMS, *folds)
