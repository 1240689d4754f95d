"""Series from a CSV file to a registered model: killed, resumed, gated, and served elsewhere."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from steadytrain.components.series.model import load
from steadytrain.components.shared.records import EvaluationRecord, RegistrationRecord, TrainRecord
from steadytrain.components.shared.workspace import Workspace

from support.command import finish, kill_paused, wait_for
from support.searched import answered_example, board_of, without_times
from support.selected import each
from support.series import FIRMS, by_mlforecast, firms, firms_for_nixtla, promoted
from support.tables import write_csv
from support.without_steadytrain import PROGRAM as WITHOUT_STEADYTRAIN

SERVE = (
    WITHOUT_STEADYTRAIN
    + """import mlflow, pandas
mlflow.set_tracking_uri(sys.argv[1])
frame = pandas.read_csv(sys.argv[3], keep_default_na=False, na_values=[""])
found = mlflow.pyfunc.load_model(sys.argv[2]).predict(frame)
print(json.dumps(found.to_dict("records")))
"""
)


def forecasts_elsewhere(steadytrain, address, source):
    """Return the forecasts of a registered model in a process without steadytrain."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", SERVE, f"sqlite:///{steadytrain.output / 'mlflow.db'}"),
            *(address, str(source)),
        ],
        env=steadytrain.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ENSEMBLE = (
    "model.framework=ensemble",
    "model.config={model_type: ensemble, members: ["
    "{weight: 2, framework: statsforecast, config: {model_type: auto_ets}}, "
    "{framework: mlforecast, config: {model_type: lightgbm}, max_steps: 5}]}",
    "training.max_steps=2",
)


@pytest.mark.long
def test_series_are_trained_killed_resumed_registered_and_forecast(steadytrain, tmp_path):
    # Whole numbers, which MLflow takes for no "double".
    whole = firms().assign(invest=lambda frame: frame["invest"].round().astype(int))
    source = write_csv(tmp_path, whole)
    fields = (f"data.source=[{source}]", *FIRMS, *ENSEMBLE)
    pause, sets = steadytrain.pause(1), (*fields, "run=killed", "training.save_steps=1")
    killed = steadytrain.start("series", *sets, **pause.everywhere)
    workspace = Workspace(steadytrain.output, "killed")
    kill_paused(pause, killed)
    finish(killed)
    # tests/unit/series/test_ensembles.py compares forecasts with those of an undisturbed run.
    assert TrainRecord.load(workspace.record("train")).attempts == 2
    judged = EvaluationRecord.load(workspace.record("evaluate"))
    assert {"mae", "mase", "pinball", "rmse", "smape"} <= judged.baselines.keys()
    registered = RegistrationRecord.load(workspace.record("register"))
    served = forecasts_elsewhere(steadytrain, registered.model_uri, source)
    assert len(served) == 33
    out = tmp_path / "forecasts.csv"
    address = registered.model_uri
    done = steadytrain("predict", address, source, "--out", out, "--output", steadytrain.output)
    assert done.code == 0, done.err
    with out.open() as handle:
        rows = list(csv.DictReader(handle))
    assert [{name: str(value) for name, value in row.items()} for row in served] == rows
    assert "forecast 33 times from 220 records" in done.err
    assert "without a value" not in done.err


LEARNED = {
    "boosted": (
        "model.framework=mlforecast",
        "model.config={model_type: lightgbm}",
        "training.eval_steps=1",
        "training.early_stopping_patience=8",
    ),
    "network": (
        "model.framework=pytorch",
        "model.config={model_type: mlp, width: 64}",
        "training.global_batch_size=128",
        "training.learning_rate=3e-3",
        "training.eval_steps=20",
        "compute.threads_per_rank=1",
    ),
}


@pytest.mark.slow
@each("kind", LEARNED, few=["boosted"])
def test_series_with_covariates_resume_and_forecast_the_future(steadytrain, tmp_path, kind):
    # Whole numbers, which MLflow takes for no "double".
    table = promoted().assign(sold=lambda frame: frame["sold"].round().astype(int))
    source = write_csv(tmp_path, table)
    fields = (
        f"data.source=[{source}]",
        "data.target=sold",
        "data.series={column: shop, time: day, horizon: 14, covariates: [price, holiday]}",
        *LEARNED[kind],
        "training.max_steps=200",
    )
    pause, sets = steadytrain.pause(4), (*fields, "run=killed", "training.save_steps=2")
    killed = steadytrain.start("series", *sets, **pause.everywhere)
    workspace = Workspace(steadytrain.output, "killed")
    kill_paused(pause, killed)
    finish(killed)
    # tests/unit/series compares the weights of each kind with those of an undisturbed run.
    trained = TrainRecord.load(workspace.record("train"))
    assert trained.attempts == 2
    assert trained.outcome == ("early_stopped" if kind == "boosted" else "finished")
    judged = EvaluationRecord.load(workspace.record("evaluate"))
    assert {"mae", "mase", "pinball", "rmse", "smape"} <= judged.baselines.keys()
    # Price and holidays explain most of what the seasonal naive forecast misses.
    assert judged.metrics["mase"].value < 0.5 * judged.baselines["mase"]
    registered = RegistrationRecord.load(workspace.record("register"))
    future = table.groupby("shop").tail(14).assign(sold=None)
    days = pd.to_datetime(future["day"]) + pd.Timedelta(days=14)
    future["day"] = days.dt.strftime("%Y-%m-%d")
    history = tmp_path / "history.csv"
    # Without two of the days, which it fills.
    pd.concat([table.drop(table.index[[3, 4]]), future]).to_csv(history, index=False)
    out, address = tmp_path / "forecasts.csv", registered.model_uri
    done = steadytrain("predict", address, history, "--out", out, "--output", steadytrain.output)
    assert done.code == 0, done.err
    assert "forecast 42 times from 640 records" in done.err
    assert "fills on a line between their neighbors: 2 in 1 series" in done.err
    with out.open() as handle:
        rows = list(csv.DictReader(handle))
    assert [row["shop"] for row in rows] == ["NA"] * 14 + ["north"] * 14 + ["south"] * 14
    assert rows[0]["day"] == future["day"].min()
    served = forecasts_elsewhere(steadytrain, address, history)
    assert [{name: str(value) for name, value in row.items()} for row in served] == rows


SEARCH = (
    "data.task=forecasting",
    "data.target=invest",
    "data.series={column: firm, time: year, horizon: 2}",
    "automl.budget.units=6",
    "automl.budget.parallel=2",
    "name=firms",
)


def search(steadytrain, source, *sets):
    """Start a search of two configurations on three rolling origins."""
    return steadytrain.begin("automl", sets=(*SEARCH, f"data.source=[{source}]", *sets))


@pytest.fixture(scope="module")
def place(shared_steadytrain, tmp_path_factory):
    """A search that nothing disturbs: where it is, and its data."""
    source = write_csv(tmp_path_factory.mktemp("firms"), firms())
    finish(search(shared_steadytrain, source))
    return shared_steadytrain, source


def losses_by_hand(horizon=2, folds=3):
    """Return the scaled errors of the seasonal naive forecast on each fold, without its data."""
    found = []
    for fold in range(folds):
        for _, table in firms().groupby("firm"):
            values = table.sort_values("year")["invest"].to_numpy()
            end = len(values) - horizon * (2 + folds - 1 - fold)
            past, truth = values[: end - horizon], values[end - horizon : end]
            found.append((np.abs(truth - past[-1]) / np.abs(np.diff(past)).mean()).mean())
    return float(np.mean(found))


def test_search_of_forecasts_ends_with_a_registered_model_that_serves_elsewhere(place):
    steadytrain, source = place
    board = board_of(steadytrain.output)
    assert (board["trials"], board["trials_completed"], board["trials_failed"]) == (6, 6, 0)
    rows = {row["name"]: row for row in board["configurations"]}
    assert {*rows} == {"seasonal naive", "Theta"}
    assert rows["seasonal naive"]["score"] == pytest.approx(losses_by_hand(), rel=1e-9)
    assert sum(board["best_params"].values()) == pytest.approx(1)
    # Folds follow each other in time, so the promise is one of choices on the other times.
    assert board["best_score"] <= board["corrected_score"] < 2
    workspace = Workspace(steadytrain.output, board["run"])
    evaluated = EvaluationRecord.load(workspace.record("evaluate"))
    assert board["test"]["metrics"]["mase"]["value"] == evaluated.metrics["mase"].value
    assert board["metric"] == "mase"
    page = (steadytrain.output / "studies" / board["study"] / "report.html").read_text()
    for said in (
        *rows,
        "Forecasts of American Steel",
        "opened once, after 2 configurations",
        "The loss is an absolute error, in errors of the seasonal naive forecast (MASE)",
    ):
        assert said in page
    address = RegistrationRecord.load(workspace.record("register")).model_uri
    served = forecasts_elsewhere(steadytrain, address, source)
    assert served == load(workspace.model).rows(firms().to_dict("records"))
    assert {row["year"] for row in served} == {"1955", "1956"}
    # The example is the history of one firm, to 1954.
    history = firms().query("firm == firm.min() and year < 1953")
    assert answered_example(steadytrain.output, address) == (len(history), 2)


@pytest.mark.long
@pytest.mark.parametrize("finished", [1, 4, 6])
def test_search_of_forecasts_that_is_killed_has_the_same_board_and_forecasts(
    place, steadytrain, finished
):
    quiet, source = place
    driver = search(steadytrain, source)
    scores = "studies/*/trials/*/scores.parquet"
    wait_for(lambda: len([*steadytrain.output.glob(scores)]) >= finished)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    finish(search(steadytrain, source))
    boards = [board_of(one.output) for one in (steadytrain, quiet)]
    assert without_times(boards[0]) == without_times(boards[1])
    assert [board["trials"] for board in boards] == [6, 6]
    forecasts = [
        load(Workspace(one.output, board["run"]).model).rows(firms().to_dict("records"))
        for one, board in zip((steadytrain, quiet), boards, strict=True)
    ]
    assert forecasts[0] == forecasts[1]
    assert boards[0]["test"]["metrics"] == boards[1]["test"]["metrics"]


@pytest.mark.long
def test_trees_that_win_know_all_but_the_test_side_though_their_run_is_killed(
    steadytrain, tmp_path
):
    source = write_csv(tmp_path, firms())
    sets = ("automl.constraints.frameworks=[mlforecast]", "automl.budget.units=3")
    driver = search(steadytrain, source, *sets)
    wait_for(lambda: [*steadytrain.output.glob("studies/*/best.yaml")])
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    finish(search(steadytrain, source, *sets))
    board = board_of(steadytrain.output)
    assert {**board["best_params"]} == {"LightGBM, its defaults": 1.0}
    expected = by_mlforecast(
        *(firms_for_nixtla(), 1, None, 2),
        lags=[1, 2, 3],
        windows=[3],
        differences=[1],
        n_estimators=100,
        min_child_samples=20,
    )
    model = load(Workspace(steadytrain.output, board["run"]).model)
    past = firms().sort_values(["firm", "year"]).groupby("firm").head(-2).to_dict("records")
    found = [row["prediction"] for row in model.rows(past)]
    assert found == pytest.approx(expected["trees"].tolist(), rel=1e-6)
    mae = (expected["trees"] - expected["y"]).abs().mean()
    assert board["test"]["metrics"]["mae"]["value"] == pytest.approx(mae, rel=1e-6)
