"""Tables that are divided by time: which records are where, and what a split then promises."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from sklearn.neighbors import KNeighborsRegressor

from steadytrain.components.automl.design import as_automl
from steadytrain.components.automl.time_limit import TimeLimit
from steadytrain.components.preprocess.folds import preview_folds, read_table
from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared.errors import BadInput, ConfigError, DataError
from steadytrain.components.tabular.in_time import parts_of, time_of
from steadytrain.components.tabular.learners import read_side
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.encoding.fields import Defect

from support.data import quarantined
from support.label_sets import labeled_table
from support.tables import REGRESSION, prepared, table_config

SEVERAL = "tabular_multi_label"
TIME = "data.columns.time=day"
SHARES = ("data.validation_share=0.15", "data.test_share=0.2")


def dated(rows=400, days=150, seed=0):
    """Return records of random days, in no order, with several records of most days."""
    chance = np.random.default_rng(seed)
    start = pd.Timestamp("2023-11-20")
    days = [start + pd.Timedelta(days=int(day)) for day in chance.integers(0, days, rows)]
    return pd.DataFrame(
        {
            "day": [day.strftime("%Y-%m-%d") for day in days],
            "x": chance.normal(size=rows).round(4),
            "number": np.arange(rows) % 97,
            "target": np.where(chance.random(rows) < 0.1, "rare", "usual"),
        }
    )


def days_of(data, side):
    records, _ = read_side(data, side)
    return sorted(record["day"] for record in records)


def divided(days, *shares):
    """Return the days of each part, where records are cut between two days: nearest to the share.

    It looks at all borders between days, which the product does not.
    """
    ordered = pd.Series(sorted(days))
    counts = ordered.value_counts().sort_index()
    before = counts.cumsum()
    result, start = [], 0
    for share in np.cumsum(shares)[:-1]:
        distance = (before - share * len(ordered)).abs().round(6)
        end = int(before[distance == distance.min()].iloc[-1])
        result.append(ordered[start:end].tolist())
        start = end
    return [*result, ordered[start:].tolist()]


@pytest.mark.parametrize("task", ["tabular_classification", "tabular_regression", SEVERAL])
def test_the_latest_records_are_held_out_whatever_their_order_and_class(tmp_path, task):
    table = dated()
    more = ["data.label_separator=;"] if task == SEVERAL else []
    if task == "tabular_regression":
        table["target"] = table["x"] * 2
    if task == SEVERAL:
        table["target"] = labeled_table(len(table))["target"]
    _, data = prepared(tmp_path, table, TIME, f"data.task={task}", *SHARES, *more)
    sides = divided(table["day"], 0.65, 0.15, 0.2)
    for side, days in zip(("train", "validation", "test"), sides, strict=True):
        assert days_of(data, side) == days
    assert abs(data.sides["test"].documents - 80) < 4
    assert data.learned_until == ("date", f"{sides[1][-1]}T00:00:00")
    assert data.tested_from == ("date", f"{sides[2][0]}T00:00:00")
    # No model sees the time, since later records only have later ones.
    columns = json.loads(data.path("columns.json").read_text())["columns"]
    assert {column["name"] for column in columns} == {"x", "number"}


def test_time_that_is_a_feature_is_learned_from(tmp_path):
    _, data = prepared(tmp_path, dated(), TIME, "data.features=[x, day]")
    columns = json.loads(data.path("columns.json").read_text())["columns"]
    assert {column["name"]: column["kind"] for column in columns} == {"x": "number", "day": "date"}


def test_equal_times_are_on_one_side_and_no_side_is_empty(tmp_path):
    table = dated()
    table["day"] = [2020 + number % 3 for number in range(len(table))]
    _, data = prepared(tmp_path, table, TIME, *SHARES)
    for side, year in (("train", 2020), ("validation", 2021), ("test", 2022)):
        assert {*map(int, days_of(data, side))} == {year}
    table["day"] = [2020 + number % 2 for number in range(len(table))]
    with pytest.raises(DataError, match=r"'day': its 2 different times .* into 3 parts"):
        prepared(tmp_path, table, TIME)


def test_equal_records_stay_where_their_times_put_them(tmp_path):
    table = dated(rows=300)
    table["x"], table["number"] = table["x"].round(0), 1
    _, data = prepared(tmp_path, table, TIME, *SHARES)
    assert sum(side.documents for side in data.sides.values()) == len(table)
    assert quarantined(data) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2024-05-31", ("date", pd.Timestamp(2024, 5, 31))),
        ("2024-05", ("date", pd.Timestamp(2024, 5, 1))),
        ("2024-05-31 13:30", ("date", pd.Timestamp(2024, 5, 31, 13, 30))),
        ("2024-05-31T01:00:00+02:00", ("zoned", pd.Timestamp(2024, 5, 30, 23))),
        ("2024-05-30T23:00:00Z", ("zoned", pd.Timestamp(2024, 5, 30, 23))),
        (pd.Timestamp(2024, 5, 31), ("date", pd.Timestamp(2024, 5, 31))),
        ("20240531", ("number", 20240531)),
        (1717113600.5, ("number", 1717113600.5)),
        ("-3", ("number", -3)),
    ],
)
def test_times_are_dates_or_numbers(value, expected):
    assert time_of("day", value) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *((value, "missing_field") for value in (None, "", " ", "NA", float("nan"))),
        *((value, "wrong_type") for value in ("31.5.2024", "2024-13-01", "soon", True, "inf")),
    ],
)
def test_record_without_a_time_is_a_defect(value, reason):
    with pytest.raises(Defect) as caught:
        time_of("day", value)
    assert caught.value.reason == reason


def test_defects_are_counted_and_kinds_are_not_mixed(tmp_path):
    table = dated()
    table.loc[3, "day"], table.loc[7, "day"] = "", "31/12/2023"
    _, data = prepared(tmp_path, table, TIME, "data.max_bad_share=0.1")
    assert sorted(item["reason"] for item in quarantined(data)) == ["missing_field", "wrong_type"]
    assert sum(side.documents for side in data.sides.values()) == len(table) - 2
    table.loc[3, "day"], table.loc[7, "day"] = "2023-12-31T00:00:00Z", "2023-12-31"
    with pytest.raises(DataError, match=r"data\.columns\.time = 'day': times are of different"):
        prepared(tmp_path, table, TIME, "data.max_bad_share=0.1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.columns.group=number"], r"data\.columns\.group.*alone decides"),
        (["data.test_source=[b.csv]"], r"data\.test_source.*alone decides"),
        (["data.validation_source=[b.csv]"], r"data\.validation_source.*alone decides"),
        (["data.splits=pool"], r"data\.splits.*alone decides"),
        (["data.split_salt=other"], r"data\.split_salt.*alone decides"),
        (["data.target=day"], r"data\.columns\.time.*is data\.target"),
        (["cross_validation.repeats=2"], r"cross_validation\.repeats.*follow each other in time"),
    ],
)
def test_settings_that_do_not_go_with_time_are_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_task(table_config(tmp_path / "table.csv", TIME, *overrides))


def test_split_that_the_source_names_counts_like_all_others(tmp_path):
    table = dated()
    (tmp_path / "data").mkdir()
    for name, rows in (("train", table[:300]), ("test", table[300:])):
        rows.to_csv(tmp_path / "data" / f"{name}.csv", index=False)
    data = preprocess(table_config(tmp_path / "data", TIME, *SHARES))
    assert days_of(data, "test") == divided(table["day"], 0.65, 0.15, 0.2)[2]
    (warning,) = (
        text
        for text in json.loads(data.path("card.json").read_text())["warnings"]
        if "test split of 100 records" in text
    )
    assert "data.columns.time = 'day' holds out the last records in time" in warning


@pytest.mark.parametrize("task", ["tabular_classification", SEVERAL])
@pytest.mark.parametrize("fold", [0, 1, 2])
def test_a_fold_learns_only_from_what_came_before_it(tmp_path, fold, task):
    table = dated(rows=600)
    more = [f"data.task={task}", *(["data.label_separator=;"] if task == SEVERAL else [])]
    if task == SEVERAL:
        table["target"] = labeled_table(len(table))["target"]
    folds = [f"cross_validation.fold={fold}", "cross_validation.folds=3"]
    config, data = prepared(tmp_path, table, TIME, *SHARES, *folds, *more)
    learned = divided(table["day"], 0.65, 0.15, 0.2)[0]
    parts = divided(learned, 0.5, *[0.125] * 4)
    found = {side: days_of(data, side) for side in ("train", "validation", "test")}
    assert found["train"] == [*chain.from_iterable(parts[: fold + 1])]
    assert found["validation"] == parts[fold + 1]
    assert found["test"] == parts[fold + 2]
    assert found["train"][-1] < found["validation"][0]
    assert found["validation"][-1] < found["test"][0]
    assert read_table(data.path(data.test_records)).num_rows == len(parts[fold + 2])
    assert preview_folds(config).sizes == tuple(map(len, parts[2:]))


def test_too_many_folds_are_an_error(tmp_path):
    table = dated()
    table["day"] = [2000 + number % 8 for number in range(len(table))]
    folds = ["cross_validation.fold=0", "cross_validation.folds=6"]
    with pytest.raises(DataError, match="different times cannot be divided into 8 parts") as caught:
        prepared(tmp_path, table, TIME, *folds)
    assert caught.value.remedy.startswith("lower cross_validation.folds")


@pytest.mark.parametrize("task", ["tabular_classification", SEVERAL, "tabular_regression"])
def test_first_fold_with_one_target_is_an_error(tmp_path, task):
    table = dated()
    late = table["day"] > "2024-02-10"
    table["target"] = np.where(late, np.where(table["x"] > 0, "2", "3"), "1")
    folds = ["cross_validation.fold=1", "cross_validation.folds=3", f"data.task={task}"]
    more = ["data.label_separator=;"] if task == SEVERAL else []
    with pytest.raises(DataError, match=r"first of 3 folds learns from, the earlier half in .*1"):
        prepared(tmp_path, table, TIME, *folds, *more)


@pytest.mark.parametrize("task", ["tabular_classification", SEVERAL])
def test_class_that_comes_late_is_named(tmp_path, task):
    table = dated()
    late = (table["day"] > "2024-02-10") & (table["x"] > 0)
    table["target"] = np.where(late, "new", table["target"])
    folds = ["cross_validation.fold=0", "cross_validation.folds=3", f"data.task={task}"]
    more = ["data.label_separator=;"] if task == SEVERAL else []
    config, data = prepared(tmp_path, table, TIME, *folds, *more)
    warnings = json.loads(data.path("card.json").read_text())["warnings"]
    assert [text for text in warnings if "first fold" in text] == [
        "no record that the first fold learns from has the label new, which only later ones have; "
        "models that need a record of each fail on that fold"
    ]
    assert preview_folds(config).warnings[-1] in warnings


@pytest.mark.parametrize("seed", range(5))
def test_parts_are_the_nearest_ones_that_keep_times_whole(seed):
    chance = np.random.default_rng(seed)
    days = chance.integers(0, 60, 500).tolist()
    shares = [0.5, 0.2, 0.1, 0.2]
    parts = parts_of([time_of("day", day) for day in days], shares)
    found = [sorted(day for day, at in zip(days, parts, strict=True) if at == n) for n in range(4)]
    assert found == divided(days, *shares)


def test_a_search_has_rolling_origins(tmp_path):
    config = table_config(tmp_path / "table.csv", TIME, "automl.quality=best")
    chosen = as_automl(config).cross_validation
    assert (chosen.folds, chosen.repeats) == (3, 1)
    with pytest.raises(BadInput, match=r"automl\.repeats = 2: folds follow each other in time"):
        as_automl(table_config(tmp_path / "table.csv", TIME, "automl.repeats=2"))
    # Units learn from 4, 5 and 6 eighths of what the winner learns from.
    assert TimeLimit(as_automl(config), None, list, list)._more == pytest.approx(8 / 5)


def quarters():
    """Return the economy of the USA by quarter, and the quarters after the year 2000."""
    frame = sm.datasets.macrodata.load_pandas().data
    months = 3 * frame["quarter"].astype(int) - 2
    frame["day"] = frame["year"].astype(int).astype(str) + "-" + months.astype(str).str.zfill(2)
    frame["target"] = frame.pop("realgdp")
    late = frame["year"] > 2000
    columns = ["day", "realinv", "m1", "unemp", "tbilrate", "target"]
    return frame.loc[~late, columns], frame.loc[late, columns]


def test_split_by_time_does_not_promise_what_a_random_split_does(tmp_path):
    """Neighbors among numbers that grow, by scikit-learn on the sides of the product."""
    table, future = quarters()
    names = ["realinv", "m1", "unemp", "tbilrate"]
    errors = {}
    random = [f"data.features=[{', '.join(names)}]"]
    for name, sets in {"random": random, "time": [TIME]}.items():
        (tmp_path / name).mkdir()
        _, data = prepared(tmp_path / name, table, REGRESSION, *SHARES, *sets)
        sides = {}
        for side in ("train", "test"):
            records, labels = read_side(data, side)
            sides[side] = pd.DataFrame(records)[names], np.array(labels)
        model = KNeighborsRegressor(3).fit(*sides["train"])
        promised, held = (
            np.sqrt(np.mean((model.predict(x) - y) ** 2))
            for x, y in (sides["test"], (future[names], future["target"]))
        )
        errors[name] = promised / held
    assert errors["random"] < 0.1
    assert errors["time"] > 0.4
