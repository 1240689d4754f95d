"""`steadytrain automl --dry-run` as a command: what it prints, and that it does nothing else."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
from typer.testing import CliRunner

from steadytrain.components.shared.errors import DataError
from steadytrain.pipelines.cli import app

from support.pictures import digits, write_folders
from support.snippets import documented
from support.tables import shipped, write_csv

FIELDS = (
    "automl.quality=fast",
    "automl.budget.trials=1",
    "automl.budget.parallel=2",
    "compute.price_per_hour=36",
)


def table(folder):
    return write_csv(folder, shipped("wine")), ["data.target=target"], 178


def images(folder):
    pictures, labels = digits()
    return write_folders(folder / "digits", pictures[:160], labels[:160]), [], 160


KINDS = {
    "a table": (table, "tabular_classification, target target", "dummy", "linear"),
    "images": (images, "image_classification", "residual network", "convolutional network"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_dry_run_shows_portfolio_units_time_and_cost_and_starts_and_writes_nothing(
    tmp_path, monkeypatch, kind
):
    make, task, begun, not_begun = KINDS[kind]
    source, own, records = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    options = [word for item in (*FIELDS, *own) for word in ("--set", item)]

    def dry_run(*more):
        words = ["automl", str(source), *options, "--output", "never", "--dry-run", *more]
        done = CliRunner().invoke(app, words)
        assert done.exception is None, done.output
        return done.stdout

    told = json.loads(dry_run("--json"))
    assert set(told) == documented("automl --dry-run")
    assert (told["folds"], told["units"], told["parallel"]) == (4, 4, 2)
    # The folds are of the training side.
    assert records / 2 < told["records"] < records
    assert told["expected_training_seconds"] == 2 * told["expected_seconds"] > 0
    assert told["expected_usd"] == pytest.approx(told["expected_training_seconds"] / 100)

    text = dry_run()
    for line in (
        rf"study +{told['study']}",
        rf"task +{task}",
        rf"records +{told['records']}, in 4 folds",
        "units +4: configurations x folds, 2 at a time",
        r"time +about \d.*",
        r"training +about \d.* for all units together",
        r"cost +about \$\d.*",
        rf"portfolio +{begun}",
        rf"not begun +{not_begun}: the budget ends before it",
    ):
        assert re.search(f"^{line}$", text, re.M), line
    shown = re.findall(r"^(?:portfolio|not begun) +(.*?)(?:: the budget.*)?$", text, re.M)
    assert shown == [item["name"] for item in told["configurations"]]
    assert len(re.findall("^portfolio ", text, re.M)) == 1
    left_out = re.findall(r"^left out +(.*?): ", text, re.M)
    assert left_out == [*told["skipped"]]

    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def planned(source, *sets):
    options = [word for item in sets for word in ("--set", item)]
    done = CliRunner().invoke(app, ["automl", str(source), *options, "--dry-run", "--json"])
    assert done.exception is None, done.output
    return json.loads(done.stdout)


def test_dry_run_counts_all_records_of_a_split_in_time_and_of_series(tmp_path):
    frame = shipped("wine").assign(day=range(178))
    told = planned(
        write_csv(tmp_path, frame), "data.target=target", "data.columns.time=day", *FIELDS
    )
    assert told["folds"] == 3
    # 0.1 for validation, 0.2 for the test side.
    assert 0.65 * 178 < told["records"] < 0.75 * 178
    days = pd.date_range("2020-01-01", periods=400, freq="D")
    lines = [{"time": day, "value": place % 7} for place, day in enumerate(days)]
    source = write_csv(tmp_path, pd.DataFrame(lines))
    told = planned(
        *(source, "data.task=forecasting", "data.target=value", "data.series.horizon=7"),
        *("data.series.time=time", *FIELDS),
    )
    assert 370 < told["records"] <= 400


def test_dry_run_shows_warnings_about_the_records(tmp_path):
    records = shipped("diabetes").astype({"target": object})
    records.loc[:2, "target"] = "none yet"
    sets = ("data.target=target", "data.task=tabular_regression", *FIELDS)
    told = planned(write_csv(tmp_path, records), *sets)
    assert any("3 of 442 records" in text for text in told["warnings"])


def test_dry_run_names_columns_that_the_records_lack(tmp_path):
    sets = ("data.target=target", "data.categories=[hue]", "data.allow_leaks=[code, hue]", *FIELDS)
    told = planned(
        write_csv(tmp_path, shipped("wine")), *sets, "model.config={monotone: {hue: 1, hues: 1}}"
    )
    there = "and none of the first records has that column"
    assert told["warnings"] == [
        f"data.allow_leaks names 'code', {there}",
        f"model.config.monotone names 'hues', {there}",
    ]


def test_columns_that_repeat_are_named_without_a_task(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text("a,b,a,y\n" + "1,2,3,x\n4,5,6,z\n" * 20)
    done = CliRunner().invoke(app, ["automl", str(path), "--set", "data.target=y", "--dry-run"])
    assert isinstance(done.exception, DataError)
    assert "'a'" in str(done.exception)
    assert "data.task" not in str(done.exception)
