"""A search on real tables: killed at several moments, it ends with the undisturbed board."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from steadytrain.components.automl.board import _trained
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import EvaluationRecord, GateRecord
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.agent.processes import processes_of
from steadytrain.components.tune.log import open_log
from steadytrain.components.tune.study import study_of
from steadytrain.components.tune.trials.folder import trials_of
from steadytrain.pipelines.compile import compile_pipeline
from steadytrain.pipelines.server.submission import Submission

from support import kfp_local
from support.label_sets import NAMES, labeled_table
from support.label_sets import SETS as LABEL_SETS
from support.plugins import install_example
from support.searched import answered_example, board_of, without_times
from support.snippets import ROOT, documented
from support.stores import copy_output, with_store
from support.tables import shipped, write_csv
from support.without_steadytrain import PROGRAM as WITHOUT_STEADYTRAIN

MAKEFILE = ROOT / "Makefile"
PROGRAM = (sys.executable, "-m", "steadytrain.pipelines", "automl")
SETS = (
    "automl.budget.units=12",
    "automl.budget.parallel=2",
    "automl.quality=fast",
    "automl.constraints.frameworks=[sklearn, lightgbm]",
    "compute.price_per_hour=36",
    "name=wine",
)


def command(source, output, *more):
    sets = (*SETS, f"data.source=[{source}]", "data.target=target")
    return [*PROGRAM, *(word for item in sets for word in ("--set", item)), "-o", output, *more]


@pytest.fixture(scope="module")
def finished_search(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("automl")
    with_store(folder / "whole", empty_store)
    source = write_csv(folder, shipped("wine"))
    done = subprocess.run(
        command(source, folder / "whole", "--json"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, source, json.loads(done.stdout)


def test_search_ends_with_a_model_that_is_judged_once(finished_search):
    folder, _, told = finished_search
    board = board_of(folder / "whole")
    assert set(told) == documented("automl")
    assert told["study"] == board["study"]
    assert (board["trials"], board["trials_completed"], board["trials_failed"]) == (12, 12, 0)
    assert board["test"]["compared"] == len(board["configurations"]) == 3
    assert board["test"]["metrics"]["accuracy"]["value"] > 0.85
    assert board["configurations"][-1]["name"] == "dummy"
    assert min(board["artifact"][name] for name in ("size_mb", "memory_mb")) > 0
    assert board["missed"] == ""
    for row in board["configurations"]:
        assert row["usd"] == pytest.approx(row["fit_seconds"] / 100, abs=1e-4)
        # A process with the libraries, and what the model adds to one.
        assert 30 < row["peak_memory_mb"] < 3000
        assert 0 <= row["memory_mb"] < 300
    best = load(folder / "whole" / "studies" / board["study"] / "best.yaml")
    assert best.model.framework == "ensemble"
    assert best.gate.promised == board["corrected_score"]
    (card,) = (folder / "whole" / "mlartifacts").rglob("README.md")
    text = card.read_text()
    assert "the best of 3 that were compared by their scores on held-out folds" in text
    assert "the training loss of the last step was" in text
    assert f"the search promised a loss of {board['corrected_score']:.4g}" in text
    names = [row["name"] for row in board["configurations"]]
    assert set(board["best_params"]) <= set(names)
    scores = [row["score"] for row in board["configurations"]]
    assert scores == sorted(scores)


def test_report_shows_the_board_and_the_test_side(finished_search):
    folder, _, told = finished_search
    study = folder / "whole" / "studies" / told["study"]
    page = (study / "report.html").read_text()
    for row in told["configurations"]:
        assert row["name"] in page
    for said in (
        "Better than default LightGBM by more than chance?",
        "Loss by time for a record",
        "Partial dependence",
        "Confusion matrix",
        "Calibration",
        "opened once, after 3 configurations were compared",
    ):
        assert said in page
    assert sorted(told["importance"]) == sorted(set(load_wine().feature_names))
    assert max(told["importance"].values()) > 0.01
    client = MlflowClient(f"sqlite:///{folder / 'whole' / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
    runs = client.search_runs([experiment.experiment_id])
    having = [
        run
        for run in runs
        if {item.path for item in client.list_artifacts(run.info.run_id, "automl")}
        == {"automl/report.html", "automl/board.json", "automl/best.yaml"}
    ]
    assert {run.info.run_name for run in having} == {told["study"], told["run"]}
    (search,) = [run for run in having if run.info.run_name == told["study"]]
    for name in ("best_score", "corrected_score", "compared", "trials_completed"):
        assert search.data.metrics[name] == pytest.approx(told[name])
    assert json.loads(search.data.tags["steadytrain.best_params"]) == told["best_params"]
    # Which fold was validated best says nothing.
    assert "steadytrain.best_trial" not in search.data.tags
    units = {run.info.run_name: run.data.metrics for run in runs}
    names = ["dummy", "linear", "LightGBM, its defaults"]
    for row in told["configurations"]:
        first = 4 * names.index(row["name"])
        own = [units[f"trial {number}"] for number in range(first, first + 4)]
        assert sum(it["fit_seconds"] for it in own) == pytest.approx(row["fit_seconds"], abs=2e-3)
        assert sum(it["usd"] for it in own) == pytest.approx(row["usd"])
        assert max(it["peak_memory_mb"] for it in own) == row["peak_memory_mb"]
        for name in ("latency_p50_ms", "latency_p99_ms", "memory_mb", "size_mb"):
            assert np.mean([it[name] for it in own]) == pytest.approx(row[name])


def test_model_of_a_search_predicts_from_its_input_example(finished_search):
    folder, _, _ = finished_search
    given, answers = answered_example(folder / "whole", "models:/wine@champion")
    assert given == answers > 0


def test_second_search_compares_its_winner_with_the_champion_of_the_first(finished_search):
    folder, source, first = finished_search
    output = copy_output(folder / "whole", folder / "challenged")
    # Only the dummy is trained.
    sets = ("automl.budget.units=4", "tune.seed=1")
    options = (word for item in sets for word in ("--set", item))
    done = subprocess.run(
        command(source, output, "--json", *options), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["study"] != first["study"]
    study = output / "studies" / told["study"]
    test = json.loads((study / "board.json").read_bytes())["test"]
    assert test == told["test"]
    # Both models were judged on the same records.
    champion, mine = (each["metrics"]["accuracy"]["value"] for each in (first["test"], test))
    assert test["examples"] == first["test"]["examples"]
    assert test["champion"] == champion
    gain = test["improvement"]
    assert gain["value"] == pytest.approx((mine - champion) / champion)
    assert gain["low"] < gain["value"] < gain["high"] < 0
    # The second look at the test side may take a part of the error rate only.
    assert test["confidence"] == pytest.approx(1 - 0.05 / (2 * 3))
    assert not test["promoted"]
    page = (study / "report.html").read_text()
    (shown,) = re.findall(r">Improvement</th>.*", page)
    assert re.findall(r"-?[\d.]+%", shown) == [
        f"{100 * gain[name]:.1f}%" for name in ("value", "low", "high")
    ]
    assert re.search(rf">{champion:.4f}<.*>version 1, on the same records<", page)
    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    assert len(client.search_model_versions("name='wine'")) == 2
    assert client.get_model_version_by_alias("wine", "champion").version == 1


def test_scores_are_the_losses_of_records_that_were_held_out(finished_search):
    folder, _, told = finished_search
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


@pytest.fixture(scope="module")
def repeated(finished_search):
    """A search of two configurations on two divisions into 4 folds."""
    folder, source, _ = finished_search
    output = folder / "repeated"
    done = subprocess.run(
        command(source, output, *REPEATED), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return output


ODD = '''
"""Two families whose units never end well."""

import time

from steadytrain.components.automl.portfolio import Family
from steadytrain.components.tabular.learners.sklearn import ConstantLearner
from steadytrain.components.train.framework import LearnerTrainer


class Hungry(ConstantLearner):
    model_type = "hungry"

    def learn(self, rows, *, learning_rate_scale):
        kept = []
        while True:
            kept.append(bytearray(b"1" * 50_000_000))
            time.sleep(0.3)


class Stuck(ConstantLearner):
    model_type = "stuck"

    def learn(self, rows, *, learning_rate_scale):
        while True:
            time.sleep(1)


HUNGRY = LearnerTrainer(Hungry)
STUCK = LearnerTrainer(Stuck)
EATS = Family("hungry", {"model_type": "hungry"}, {"eats memory": (0, {})})
HANGS = Family("stuck", {"model_type": "stuck"}, {"hangs": (0, {})})
'''


def test_search_in_time_scores_each_fold_by_what_came_before_it(tmp_path, empty_store):
    """160 days in no order, whose number grows: 112 to learn from, 16 to validate, 32 to test."""
    noise = np.random.default_rng(0).normal(size=160)
    days = pd.date_range("2024-01-01", periods=160).strftime("%Y-%m-%d")
    frame = pd.DataFrame({"day": days, "x": noise.round(3), "target": np.arange(160) + noise})
    source = write_csv(tmp_path, frame.sample(frac=1, random_state=0))
    with_store(tmp_path / "output", empty_store)
    sets = (
        *("data.columns.time=day", "data.task=tabular_regression", "automl.budget.units=6"),
        *("data.validation_share=0.1", "data.test_share=0.2"),
    )
    more = (word for item in sets for word in ("--set", item))
    done = subprocess.run(
        command(source, tmp_path / "output", "--json", *more),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    board = json.loads(done.stdout)
    assert (board["folds"], board["trials_completed"]) == (3, 6)
    # Half of the 112 days are the first part, and each of the four others has 14 days.
    errors = [
        (frame["target"][start + 14 : start + 28] - frame["target"][:start].mean()) ** 2
        for start in (56, 70, 84)
    ]
    scores = {row["name"]: row["score"] for row in board["configurations"]}
    assert scores["dummy"] == pytest.approx(np.mean(errors), rel=1e-6)
    assert board["test"]["examples"] == 32
    # A random split would promise the variance of the target; the test side shows more.
    assert board["test"]["metrics"]["mse"]["value"] > 1.5 * frame["target"].var()


def test_groups_are_kept_together_and_the_page_shows_the_slices(tmp_path, empty_store):
    """Each of 60 farms has up to 9 records in any of two seasons; a number tells the class."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"farm": np.repeat(np.arange(60), random.integers(2, 10, 60))})
    frame["farm"] = [f"farm {number}" for number in frame["farm"]]
    frame["season"] = random.choice(["spring", "autumn"], len(frame))
    frame["target"] = random.choice(["sick", "well"], len(frame))
    frame["x"] = random.normal(size=len(frame)) + 2 * (frame["target"] == "sick")
    source, output = write_csv(tmp_path, frame), with_store(tmp_path / "output", empty_store)
    sets = ("data.columns={group: farm, slice: season}", "automl.budget.units=8", "name=farms")
    more = (word for item in sets for word in ("--set", item))
    done = subprocess.run(
        command(source, output, "--json", *more), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    board = json.loads(done.stdout)
    assert board["importance"].keys() == {"x"}
    study, workspace = output / "studies" / board["study"], Workspace(output, board["run"])

    farm_of = {str(x): farm for x, farm in zip(frame["x"], frame["farm"], strict=True)}
    for data, sides in ((study, 6), (output, 3)):
        groups = {
            shard.parent.name: {farm_of[x] for x in shard_values(shard, "x")}
            for shard in data.glob("data/*/*/shard-*.arrow")
        }
        assert len(groups) == sides
        # All 60, and none twice.
        assert sorted(farm for side in groups.values() for farm in side) == sorted({*frame["farm"]})
        for unit in range(8 if data == study else 0):
            scores = pq.read_table(study / "trials" / f"{unit:04d}" / "scores.parquet")
            assert {*scores["group"].to_pylist()} == groups[f"fold-{unit % 4}"]
    judged = GateRecord.load(workspace.record("gate"))
    assert judged.units == len(groups["test"]) < board["test"]["examples"]

    page = (study / "report.html").read_text()
    _, _, table = page.partition("By slice")
    table = table.partition("</table>")[0]
    by_slice = EvaluationRecord.load(workspace.record("evaluate")).slices
    assert by_slice.keys() == {"spring", "autumn"}
    for name, values in by_slice.items():
        (row,) = re.findall(rf">{name}</th>(.*?)</tr>", table, re.S)
        shown = [float(cell) for cell in re.findall(r"<td[^>]*>([^<]+)</td>", row)]
        assert shown == pytest.approx([*values.values()], rel=1e-3)


def shard_values(path, column):
    """Return the values of a column, as they were written, in prepared rows."""
    rows = pa.ipc.open_file(path).read_all()["features"].to_pylist()
    return [json.loads(row)[column] for row in rows]


@pytest.fixture(scope="module")
def odd(tmp_path_factory, empty_store):
    """Return the folder and the board of a search with odd families, where one class is rare."""
    folder = tmp_path_factory.mktemp("odd")
    with_store(folder / "out", empty_store)
    site = folder / "site"
    info = site / "odd-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[steadytrain.trainers]\nhungry = odd:HUNGRY\nstuck = odd:STUCK\n"
        "[steadytrain.families]\nhungry = odd:EATS\nstuck = odd:HANGS\n"
    )
    (site / "odd.py").write_text(ODD)
    random = np.random.default_rng(0)
    inputs = random.normal(size=(600, 3))
    chances = 1 / (1 + np.exp(-(2.0 * inputs[:, 0] - 3.5)))
    rows = [
        {"a": one, "b": two, "c": three, "target": "rare" if rare else "common"}
        for (one, two, three), rare in zip(
            inputs.tolist(), random.uniform(size=600) < chances, strict=True
        )
    ]
    sets = (
        "automl.constraints.frameworks=[sklearn, lightgbm, hungry, stuck]",
        "automl.constraints.memory_gb=1.5",
        "automl.budget.unit_minutes=1.2",
        "automl.budget.units=16",
        "automl.decision=balanced_accuracy",
        "gate.metric=balanced_accuracy",
    )
    options = (word for item in sets for word in ("--set", item))
    done = subprocess.run(
        command(write_csv(folder, rows), folder / "out", "--json", *options),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stderr
    return folder / "out", json.loads(done.stdout)


def test_unit_that_eats_memory_and_one_that_hangs_end_as_such_and_cost_no_other(odd):
    _, found = odd
    assert "failed (host_oom): killed with " in found["skipped"]["eats memory"]
    assert "it may take 1.5 GB" in found["skipped"]["eats memory"]
    assert found["skipped"]["hangs"].startswith("failed (hang): killed after ")
    # Two of each begin at once.
    assert (found["trials_failed"], found["trials_not_started"]) == (4, 4)
    assert found["trials_completed"] == 8
    linear, dummy = found["configurations"]
    assert (linear["name"], dummy["name"]) == ("linear", "dummy")
    assert linear["score"] < 0.8 * dummy["score"]
    assert found["best_params"] == {"linear": 1.0}


def test_decisions_of_the_search_are_those_of_its_registered_model(odd):
    """Of a record of the rare class, the likeliest one is nearly always the other."""
    folder, found = odd
    decision = found["decision"]
    assert decision["decided"] > decision["likeliest"] + 0.1
    weights = found["calibration"]["decision"]
    assert weights["rare"] > weights["common"]
    assert found["test"]["metrics"]["balanced_accuracy"]["value"] > decision["likeliest"]
    best = load(folder / "studies" / found["study"] / "best.yaml")
    assert best.model.config["decision"] == weights


REPEATED = ("--set", "automl.repeats=2", "--set", "automl.budget.units=16")


@pytest.mark.long
def test_score_on_repeated_folds_is_that_of_scikit_learn(repeated):
    board = board_of(repeated)
    study = repeated / "studies" / board["study"]
    tables = [
        pq.read_table(study / "trials" / f"{number:04d}" / "scores.parquet").to_pylist()
        for number in range(8, 16)
    ]
    files = {path.parent.name: path for path in study.rglob("fold-*/records.arrow")}
    records = [pa.ipc.open_file(files[f"fold-{fold}"]).read_all() for fold in range(8)]
    losses, metrics = [], []
    for first in (0, 4):
        chances, truth = [], []
        for fold in range(first, first + 4):
            others = [records[n] for n in range(first, first + 4) if n != fold]
            inputs, labels = inputs_of(others)
            held, known = inputs_of([records[fold]])
            model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1000))
            found = model.fit(inputs, labels).predict_proba(held)
            by_id = dict(zip(records[fold]["id"].to_pylist(), found, strict=True))
            assert len(by_id) == len(tables[fold])
            for row in tables[fold]:
                assert row["probabilities"] == pytest.approx(by_id[row["id"]], abs=2e-3)
            chances.append(found)
            truth.append(known)
        chances, truth = np.concatenate(chances), np.concatenate(truth)
        losses.append(log_loss(truth, chances))
        metrics.append(accuracy_score(truth, np.unique(truth)[chances.argmax(axis=1)]))
    (linear,) = [row for row in board["configurations"] if row["name"] == "linear"]
    assert board["repeats"] == 2
    assert linear["score"] == pytest.approx(np.mean(losses), rel=1e-2)
    assert linear["metrics"]["accuracy"] == pytest.approx(np.mean(metrics))
    assert len({frozenset(table["id"].to_pylist()) for table in records}) == 8


def inputs_of(tables):
    rows = [json.loads(text) for table in tables for text in table["features"].to_pylist()]
    labels = np.concatenate([table["label"].to_numpy() for table in tables])
    return np.array([[row[name] for name in sorted(row)] for row in rows]), labels


@pytest.mark.long
def test_killed_search_on_repeated_folds_has_the_same_board(finished_search, repeated):
    folder, source, _ = finished_search
    output = folder / "repeated-killed"
    driver = subprocess.Popen(
        command(source, output, *REPEATED), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len([*output.glob("studies/*/trials/*/scores.parquet")]) < 10:
        assert driver.poll() is None
        time.sleep(0.05)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    done = subprocess.run(
        command(source, output, *REPEATED), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert without_times(board_of(output)) == without_times(board_of(repeated))
    assert board_of(output)["trials"] == 16
    # What units left is damaged afterwards: those units train again.
    (study,) = output.glob("studies/*")
    scores = [study / "trials" / f"{number:04d}" / "scores.parquet" for number in (3, 9, 12)]
    content = [path.read_bytes() for path in scores]
    flipped = bytearray(content[0])
    flipped[len(flipped) // 3] ^= 1
    scores[0].write_bytes(flipped)
    scores[1].write_bytes(content[1][:-100])
    scores[2].unlink()
    known, history = study_of(open_log(str(study.parent), study.name).read())
    with pytest.raises(BadInput, match=r"0003/scores\.parquet is not as the trial left it"):
        [*_trained(known, history, study, {})]
    done = subprocess.run(
        command(source, output, *REPEATED), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for number in (3, 9, 12):
        assert f"trial {number} trains again: " in done.stdout
    assert done.stdout.count("trains again") == 3
    assert without_times(board_of(output)) == without_times(board_of(repeated))
    tables = [pq.read_table(path) for path in scores]
    before = [pq.read_table(io.BytesIO(one)) for one in (content[0], content[1], content[2])]
    assert [one.replace_schema_metadata() for one in tables] == [
        one.replace_schema_metadata() for one in before
    ]


@pytest.mark.long
def test_family_of_the_guide_is_searched_like_ours(tmp_path):
    """Those are the lines of tests/plugins."""
    package = install_example(tmp_path)
    source = write_csv(tmp_path, shipped("wine"))
    done = subprocess.run(
        [
            *command(source, tmp_path / "out", "--json"),
            *("--set", "automl.constraints.frameworks=[lightgbm]", "--set", "name=stumps"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["configurations"]}
    assert rows["stumps"]["family"] == "stumps"
    assert rows["stumps"]["score"] < 0.5
    assert {row["family"] for row in rows.values()} == {"lightgbm", "stumps"}


def board_with(folder, source, *limits, units=12):
    """Search with limits; return what the command says."""
    sets = [f"automl.budget.units={units}", "automl.constraints.frameworks=[]", *limits]
    done = subprocess.run(
        command(source, folder, "--json", *(word for item in sets for word in ("--set", item))),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_larger_budget_continues_a_search_that_has_a_name(tmp_path, empty_store):
    source, output = write_csv(tmp_path, shipped("wine")), with_store(tmp_path / "out", empty_store)
    winners = list[str]()
    for units in (4, 8):
        sets = ("--json", "--run", "mine", "--set", f"automl.budget.units={units}")
        done = subprocess.run(
            command(source, output, *sets), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["study"], told["trials"], told["trials_failed"]) == ("mine", units, 0)
        winners += told["best_params"]
    assert winners == ["dummy", "linear"]
    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    assert len(client.search_model_versions("name='wine'")) == 2
    runs = [path.name for path in (output / "runs").glob("mine-*")]
    assert len(runs) == 2


@pytest.mark.long
def test_interpretable_search_ends_with_one_linear_model(finished_search):
    folder, source, _ = finished_search
    found = board_with(folder / "plain", source, "automl.constraints.interpretable=true")
    assert {row["family"] for row in found["configurations"]} == {"dummy", "linear"}
    ((name, share),) = found["best_params"].items()
    assert name.startswith("linear")
    assert share == 1
    assert "interpretable" in found["skipped"]["CatBoost"]
    best = load(folder / "plain" / "studies" / found["study"] / "best.yaml")
    (member,) = best.model.config["members"]
    assert member["config"]["model_type"] == "linear"


@pytest.mark.long
def test_model_that_is_too_large_is_shown_and_left_out(finished_search):
    folder, source, _ = finished_search
    limits = ("automl.constraints.model_mb=0.2", "automl.constraints.frameworks=[sklearn]")
    found = board_with(folder / "small", source, *limits, units=16)
    rows = {row["name"]: row for row in found["configurations"]}
    large = rows["extra trees, larger leaves"]
    assert large["size_mb"] > 0.2
    assert "above 200 kB" in large["missed"]
    assert large["name"] not in found["best_params"]
    assert not rows["linear"]["missed"]
    used = [rows[name]["size_mb"] for name in found["best_params"]]
    assert sum(used) <= 0.2
    page = (folder / "small" / "studies" / found["study"] / "report.html").read_text()
    assert "misses a limit" in page


@pytest.mark.long
def test_limit_on_latency_that_no_model_keeps_ends_with_the_reason(finished_search):
    folder, source, _ = finished_search
    limit = "automl.constraints.latency_ms=1e-6"
    done = subprocess.run(
        command(source, folder / "fast", "--set", limit),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "no winner" in done.stderr
    board = board_of(folder / "fast")
    assert board["best_params"] == {}
    assert all(
        "ms for a record, above 1e-06 ms" in row["missed"] for row in board["configurations"]
    )


@pytest.mark.long
@pytest.mark.parametrize("moments", [(6,), (0, 9)], ids=str)
def test_driver_that_is_killed_ends_with_the_same_board(finished_search, moments):
    folder, source, _ = finished_search
    output = folder / f"killed {len(moments)}"
    for finished in moments:
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


IN_SEARCH = (
    *("driver", "trial", "driver", "rank", "trials", "driver", "agent", "driver"),
    *("trial", "driver", "rank", "driver", "driver", "trial", "driver"),
)
"""Whom to kill: the driver when the search got further, or the first process with such a title."""
AFTER = ("best.yaml", "preprocess", "train", "evaluate", "register")
"""What the driver has just written when it is killed later."""


class Killed:
    """A search whose processes are killed.

    kills: who was killed so far.
    """

    def __init__(self, words, output, study):
        self.words, self.output, self.study = words, output, output / "studies" / study
        self.kills, self.driver = [], None

    def start(self):
        null = subprocess.DEVNULL
        self.driver = subprocess.Popen(self.words, stdout=null, stderr=null)

    def records(self):
        there = self.study.is_dir()
        return len(open_log(str(self.study.parent), self.study.name).read()) if there else 0

    def kill(self, whom):
        """Kill the driver and start it again, or kill the first process with such a title."""
        if whom == "driver":
            os.kill(self.driver.pid, signal.SIGKILL)
            self.driver.wait()
            self.start()
        else:
            self.wait(lambda: self._killed(whom))
        self.kills.append(whom)

    def wait(self, for_what):
        end = time.monotonic() + 600
        while not for_what():
            assert self.driver.poll() is None, f"it ended after {self.kills}"
            assert time.monotonic() < end, f"it hangs after {self.kills}"
            time.sleep(0.02)

    def _killed(self, whom):
        for process in processes_of(trials_of(self.study)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith(f"steadytrain: {whom} "):
                    process.kill()
                    return True
        return False


@pytest.mark.long
def test_search_whose_processes_are_killed_at_20_moments_has_the_same_board_and_model(
    finished_search,
):
    folder, source, told = finished_search
    output, delay = folder / "often", random.Random(0)
    search = Killed(command(source, output), output, told["study"])
    search.start()
    before = 0
    for whom in IN_SEARCH:
        if whom == "driver":
            search.wait(lambda known=before: search.records() > known)
            before = search.records()
        time.sleep(delay.uniform(0, 1))
        search.kill(whom)
    for written in AFTER:
        records = f"runs/wine-*/records/{written}.json"
        place_of = f"studies/*/{written}" if written == "best.yaml" else records
        search.wait(lambda name=place_of: [*output.glob(name)])
        search.kill("driver")
    assert len(search.kills) == 20
    assert search.driver.wait(600) == 0
    board, quiet = board_of(output), board_of(folder / "whole")
    assert without_times(board) == without_times(quiet)
    assert (board["trials"], board["trials_failed"]) == (12, 0)
    assert board["test"]["metrics"] == quiet["test"]["metrics"]
    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    assert len(client.search_model_versions("name='wine'")) == 1


def test_compiled_pipeline_whose_driver_is_killed_ends_as_the_quiet_command(
    finished_search, empty_store, steadytrain
):
    folder, source, _ = finished_search
    output = with_store(folder / "compiled", empty_store)
    # Pods reach what is on the volume.
    shared = shutil.copy(source, output)
    sets = [*SETS, f"data.source=[{shared}]", "data.target=target", f"output={output}"]
    sent = Submission.of("", sets, pipeline="automl")
    pipeline = compile_pipeline(folder / "pipeline.yaml", pipeline="automl")
    parameters = folder / "parameters.json"
    parameters.write_text(json.dumps(sent.parameters))
    program = [sys.executable, kfp_local.__file__, pipeline, parameters, folder / "kfp"]
    environment = steadytrain.environment()
    null = subprocess.DEVNULL
    driver = subprocess.Popen(program, env=environment, stdout=null, stderr=null)
    while len([*output.glob("studies/*/trials/*/scores.parquet")]) < 7:
        assert driver.poll() is None
        time.sleep(0.05)
    for process in [driver, *psutil.Process(driver.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    driver.wait()
    assert not [*output.glob("studies/*/board.json")]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    executed = {path.name for path in (folder / "kfp").glob("*/*")}
    assert executed >= {"preprocess", "search", "train-winner", "evaluate", "register", "report"}
    board, ours = board_of(output), board_of(folder / "whole")
    assert without_times(board) == without_times(ours)
    assert board["trials"] == 12
    for name in ("examples", "promoted", "compared"):
        assert board["test"][name] == ours["test"][name]
    metrics, known = board["test"]["metrics"], ours["test"]["metrics"]
    assert {name: item["value"] for name, item in metrics.items()} == {
        name: item["value"] for name, item in known.items()
    }
    assert board["study"] == sent.config.run
    # The winner trains once.
    assert {path.name for path in output.glob("runs/*")} == {board["study"], board["run"]}


FRESH = (
    WITHOUT_STEADYTRAIN
    + """import mlflow, pandas
mlflow.set_tracking_uri(sys.argv[1])
frame = pandas.read_csv(sys.argv[2]).drop(columns="target")
found = mlflow.pyfunc.load_model("models:/wine@champion").predict(frame)
print(found.to_json(orient="records"))
"""
)


@pytest.mark.long
def test_search_for_sets_of_labels_ends_with_a_model_that_predicts_in_a_fresh_process(tmp_path):
    frame = labeled_table()
    source, output = write_csv(tmp_path, frame), tmp_path / "output"
    sets = (word for item in LABEL_SETS for word in ("--set", item))
    done = subprocess.run(
        command(source, output, *sets, "--json"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    board = board_of(output)
    assert (board["trials_completed"], board["trials_failed"]) == (12, 0)
    linear, dummy = (
        next(row for row in board["configurations"] if row["name"] == name)
        for name in ("linear", "dummy")
    )
    assert linear["metrics"]["micro_f1"] > dummy["metrics"]["micro_f1"] + 0.1
    assert linear["score"] < dummy["score"]
    assert board["test"]["metric"] == "micro_f1"
    assert len(board["importance"]) == len(frame.columns) - 1
    page = (output / "studies" / board["study"] / "report.html").read_text()
    for said in ("Partial dependence", *NAMES):
        assert said in page
    store = f"sqlite:///{output / 'mlflow.db'}"
    told = subprocess.run(
        [sys.executable, "-c", FRESH, store, str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    fresh = json.loads(told.stdout.splitlines()[-1])
    for row in fresh:
        assert row["prediction"] == [n for n in sorted(NAMES) if row[f"probability_{n}"] >= 0.5]
    out = tmp_path / "out.jsonl"
    predict = (*PROGRAM[:-1], "predict", "wine@champion", str(source), "--out", str(out))
    subprocess.run([*predict, "--output", str(output)], check=True, capture_output=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row, again in zip(rows, fresh, strict=True):
        assert row["prediction"] == again.pop("prediction")
        assert {name: row[name] for name in again} == pytest.approx(again)
    hits = [
        set(row["prediction"]) == set(filter(None, text.split(";")))
        for row, text in zip(rows, frame["target"].fillna(""), strict=True)
    ]
    assert np.mean(hits) > 0.3


def predicted(model, source, output, out):
    """Return what a model predicts for the records of a file."""
    words = (*PROGRAM[:-1], "predict", model, str(source), "--out", str(out))
    subprocess.run([*words, "--output", str(output)], check=True, capture_output=True)
    return [json.loads(line)["prediction"] for line in out.read_text().splitlines()]


@pytest.mark.long
def test_search_for_numbers_keeps_them_monotone_and_its_winner_trains_again(tmp_path, empty_store):
    frame, output = shipped("diabetes"), tmp_path / "output"
    source = write_csv(tmp_path, frame)
    with_store(output, empty_store)
    sets = (
        *("name=diabetes", f"data.source=[{source}]", "data.target=target", f"output={output}"),
        *("automl.quality=fast", "automl.budget.units=14", "automl.budget.parallel=2"),
        *("model.config={monotone: {bmi: 1}}", "training.learning_rate=9"),
    )
    options = [word for item in sets for word in ("--set", item)]
    done = subprocess.run([*PROGRAM, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "task tabular_regression" in done.stderr
    assert "not used: training.learning_rate" in done.stderr
    board = board_of(output)
    # Two more units would have been no configuration.
    assert (board["trials"], board["compared"]) == (12, 3)
    assert board["skipped"]["linear"] == "its models cannot keep model.config.monotone"
    study = output / "studies" / board["study"]
    for place, name in enumerate(("LightGBM, its defaults", "LightGBM, few leaves")):
        folders = [study / "trials" / f"{4 * place + fold:04d}" for fold in range(4)]
        tables = [pq.read_table(folder / "scores.parquet") for folder in folders]
        errors = np.concatenate([one["predicted"].to_numpy() - one["target"] for one in tables])
        (row,) = [one for one in board["configurations"] if one["name"] == name]
        assert row["score"] == pytest.approx(np.square(errors).mean(), rel=1e-6)
    page = (study / "report.html").read_text()
    assert "esidual" in page
    lines = [frame.drop(columns="target").iloc[:20].assign(bmi=bmi) for bmi in (-0.08, 0.0, 0.08)]
    grid = pd.concat(lines)
    grid.to_csv(tmp_path / "grid.csv", index=False)
    found = predicted("diabetes@champion", tmp_path / "grid.csv", output, tmp_path / "one.jsonl")
    low, middle, high = np.array(found).reshape(3, -1)
    assert (low <= middle).all()
    assert (middle <= high).all()
    assert (high - low).mean() > 20
    best = [*PROGRAM[:-1], "run", str(study / "best.yaml"), "--run", "again"]
    subprocess.run(best, check=True, capture_output=True)
    assert found == predicted(
        "models:/diabetes/2", tmp_path / "grid.csv", output, tmp_path / "two.jsonl"
    )


@pytest.mark.long
def test_demo_of_the_make_file_ends_with_a_model_that_is_judged_and_a_page(
    tmp_path, empty_store, record_property
):
    (line,) = re.findall(r"^\t\$\(BIN\)/steadytrain automl (\w+) ", MAKEFILE.read_text(), re.M)
    output = with_store(tmp_path / "output", empty_store)
    done = subprocess.run(
        [*PROGRAM, line, "--json", "-o", output], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    # It depends on the machine; the README says three minutes.
    record_property("command_seconds", told["command_seconds"])
    print(f"the demo took {told['command_seconds']:.0f} s")
    assert (told["trials_failed"], told["trials_not_started"]) == (0, 0)
    assert told["trials_completed"] == told["trials"] == told["folds"] * told["compared"]
    assert told["better_than_default_lightgbm"]["value"] is not None
    test = told["test"]
    assert test["metrics"]["accuracy"]["value"] > 0.85
    assert test["compared"] == told["compared"]
    assert test["promoted"], test["gate"]
    assert GateRecord.load(Workspace(output, told["run"]).record("gate")).reason == test["gate"]
    page = (output / "studies" / told["study"] / "report.html").read_text()
    for shown in (test["gate"], "Confusion matrix", "Partial dependence", "Calibration"):
        assert shown in page
    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    assert client.get_model_version_by_alias("vote", "champion").version == 1
