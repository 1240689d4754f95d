"""A search on real tables: killed at several moments, it ends with the undisturbed board."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from steadytrain.components.shared.config import load

from support.tables import shipped, write_csv

PROGRAM = (sys.executable, "-m", "steadytrain.pipelines", "automl")
SETS = (
    "automl.budget.units=12",
    "automl.budget.parallel=2",
    "automl.quality=fast",
    "automl.constraints.frameworks=[sklearn, lightgbm]",
    "name=wine",
)
MEASURED = {"fit_seconds", "latency_p50_ms", "latency_p99_ms"}


def command(source, output, *more):
    sets = (*SETS, f"data.source=[{source}]", "data.target=target")
    return [*PROGRAM, *(word for item in sets for word in ("--set", item)), "-o", output, *more]


def board_of(output):
    (path,) = output.glob("studies/*/board.json")
    return json.loads(path.read_bytes())


def without_times(board):
    rows = [
        {name: value for name, value in row.items() if name not in MEASURED}
        for row in board["configurations"]
    ]
    kept = ("best_params", "best_score", "corrected_score", "better_than_default_lightgbm")
    return {"rows": rows, "skipped": board["skipped"]} | {name: board[name] for name in kept}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("automl")
    source = write_csv(folder, shipped("wine"))
    done = subprocess.run(
        command(source, folder / "whole", "--json"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, source, json.loads(done.stdout)


def test_search_ends_with_a_model_that_is_judged_once(place):
    folder, _, told = place
    board = board_of(folder / "whole")
    assert told["study"] == board["study"]
    assert (board["trials"], board["trials_completed"], board["trials_failed"]) == (12, 12, 0)
    assert board["test"]["compared"] == len(board["configurations"]) == 3
    assert board["test"]["metrics"]["accuracy"]["value"] > 0.85
    assert board["configurations"][-1]["name"] == "dummy"
    assert board["artifact"]["size_mb"] > 0
    best = load(folder / "whole" / "studies" / board["study"] / "best.yaml")
    assert best.model.framework == "ensemble"
    names = [row["name"] for row in board["configurations"]]
    assert set(board["best_params"]) <= set(names)
    scores = [row["score"] for row in board["configurations"]]
    assert scores == sorted(scores)


def test_scores_are_the_losses_of_records_that_were_held_out(place):
    folder, _, told = place
    study = folder / "whole" / "studies" / told["study"]
    for row in told["configurations"]:
        number = ["dummy", "linear", "LightGBM, its defaults"].index(row["name"])
        seen, losses = [], []
        for fold in range(4):
            table = pq.read_table(study / "trials" / f"{4 * number + fold:04d}" / "scores.parquet")
            seen += table.column("id").to_pylist()
            chances = np.array(table.column("probabilities").to_pylist())
            truth = table.column("label").to_numpy()
            losses += (-np.log(chances[np.arange(len(truth)), truth])).tolist()
        assert len(seen) == len(set(seen))
        assert row["score"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_driver_that_is_killed_again_and_again_ends_with_the_same_board(place):
    folder, source, _ = place
    output = folder / "killed"
    for finished in (0, 2, 5, 9):
        driver = subprocess.Popen(
            command(source, output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while len([*output.glob("studies/*/trials/*/scores.parquet")]) < finished + 1:
            assert driver.poll() is None
            time.sleep(0.05)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    done = subprocess.run(command(source, output), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert without_times(board_of(output)) == without_times(board_of(folder / "whole"))
    assert board_of(output)["trials"] == 12
