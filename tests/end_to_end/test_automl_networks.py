"""Searches of images, of texts, and of records with both: killed, continued, served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from steadytrain.components.shared.records import TrainRecord
from steadytrain.components.shared.workspace import Workspace

from support.mixed import MIXED, digits_of_mnist, write_mixed
from support.pictures import digits, write_folders
from support.searched import answered_example, board_of, without_times
from support.stores import with_store

PROGRAM = (sys.executable, "-m", "steadytrain.pipelines")
FAST = (
    "automl.quality=fast",
    "automl.budget.trials=2",
    "automl.budget.parallel=2",
    "compute.threads_per_rank=1",
)


def words(source, output, *sets, command="automl"):
    given = (word for item in sets for word in ("--set", item))
    return [*PROGRAM, command, str(source), *given, "-o", str(output)]


def searched(source, output, *sets):
    done = subprocess.run(
        [*words(source, output, *FAST, *sets), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def named(told):
    return f"models:/{told['study'].rpartition('-')[0]}/1"


def predicted(told, source, output, out):
    subprocess.run(
        [*PROGRAM, "predict", named(told), str(source), "-o", str(output), "--out", str(out)],
        check=True,
        capture_output=True,
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_search_of_images_that_is_killed_has_the_same_board_and_a_model_that_predicts(
    tmp_path, empty_store
):
    images, labels = digits()
    source = write_folders(tmp_path / "digits", images[:400], labels[:400])
    for name in ("whole", "killed"):
        with_store(tmp_path / name, empty_store)
    epochs = "training.num_train_epochs=6"
    told = searched(source, tmp_path / "whole", epochs)
    board = board_of(tmp_path / "whole")
    assert (board["trials"], board["trials_completed"]) == (8, 8)
    assert board["better_than_default_lightgbm"] is None
    assert board["better_than_frequencies"]["by_more_than_chance"] is True
    # Ten classes, almost as frequent.
    gain = board["better_than_frequencies"]["value"]
    assert gain + board["corrected_score"] == pytest.approx(np.log(10), abs=0.05)
    assert board["test"]["compared"] == 2
    assert board["calibration"] == {}
    assert min(board["artifact"][name] for name in ("latency_p50_ms", "size_mb")) > 0
    # Libraries are not the model's.
    assert board["artifact"]["memory_mb"] < 50

    study = tmp_path / "whole" / "studies" / told["study"]
    page = (study / "report.html").read_text()
    for shown in (
        "Loss by time for a record",
        "Confusion matrix",
        "Calibration",
        "Better than the frequencies of the classes by more than chance?</dt><dd>yes: its loss is",
        "opened once, after 2 configurations were compared",
    ):
        assert shown in page
    names = ["residual network", "convolutional network"]
    for row in board["configurations"]:
        seen, losses = [], []
        for fold in range(4):
            number = 4 * names.index(row["name"]) + fold
            table = pq.read_table(study / "trials" / f"{number:04d}" / "scores.parquet")
            chances = np.array(table.column("probabilities").to_pylist())
            truth = table.column("label").to_numpy()
            losses += (-np.log(chances[np.arange(len(truth)), truth])).tolist()
            seen += table.column("id").to_pylist()
        assert len(seen) == len(set(seen)) == 280
        assert row["score"] == pytest.approx(np.mean(losses), rel=1e-5)
    # Each choice is between the same two on three of the folds.
    assert board["corrected_score"] >= board["best_score"] - 1e-12

    # Batches of 64: a unit learns from three quarters of the 280 records, the winner from all.
    assert max(step for row in board["configurations"] for step in row["steps"]) <= 20
    assert trained(tmp_path / "whole", told["run"]).steps == 27

    output = tmp_path / "killed"
    for finished in (1, 5):
        driver = subprocess.Popen(
            words(source, output, *FAST, epochs),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while len([*output.glob("studies/*/trials/*/scores.parquet")]) < finished:
            assert driver.poll() is None
            time.sleep(0.05)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    again = searched(source, output, epochs)
    assert without_times(board_of(output)) == without_times(board)
    winners = trained(output, again["run"]), trained(tmp_path / "whole", told["run"])
    assert winners[0].weights_digest == winners[1].weights_digest

    answers = predicted(told, source, tmp_path / "whole", tmp_path / "answers.jsonl")
    given, answered = answered_example(tmp_path / "whole", named(told))
    assert given == answered > 0
    right = [answer["prediction"] == answer["source"].split("/")[-2] for answer in answers]
    assert len(right) == 400
    assert np.mean(right) > 0.9


def trained(output, run):
    return TrainRecord.load(Workspace(output, run).record("train"))


@pytest.mark.long
def test_search_of_5000_digits_finds_a_network_that_reads_them(tmp_path, empty_store):
    images, labels = digits_of_mnist()
    source = write_folders(tmp_path / "mnist", images.reshape(-1, 28, 28).astype(np.uint8), labels)
    with_store(tmp_path / "output", empty_store)
    searched(source, tmp_path / "output", "training.num_train_epochs=4", "automl.budget.trials=1")
    board = board_of(tmp_path / "output")
    assert board["best_params"] == {"residual network": 1.0}
    assert board["test"]["metrics"]["accuracy"]["value"] > 0.95
    # Of records that no network of a fold has learned from.
    promised = board["corrected_score"] - board["test"]["metrics"]["loss"]["value"]
    assert abs(promised) < 0.1


@pytest.mark.slow
def test_search_of_mixed_records_ends_with_one_network_that_predicts(tmp_path, empty_store):
    table = write_mixed(tmp_path / "mixed", 240)
    output = tmp_path / "output"
    with_store(output, empty_store)
    own = [one for one in MIXED if "share" not in one and "learning_rate" not in one]
    told = searched(table, output, *own, "training.num_train_epochs=6", "automl.budget.trials=1")
    board = board_of(output)
    assert board["best_params"] == {"fused": 1.0}
    assert board["artifact"]["latency_p50_ms"] > 0
    best = (output / "studies" / told["study"] / "best.yaml").read_text()
    assert "multimodal_classification" in best
    answers = predicted(told, table, output, tmp_path / "answers.jsonl")
    given, answered = answered_example(output, named(told))
    assert given == answered > 0
    truth = pd.read_csv(table)["kind"]
    assert len(answers) == 240
    assert {answer["prediction"] for answer in answers} <= {*truth}


@pytest.mark.slow
def test_search_of_texts_from_scratch_ends_with_a_model_that_predicts(tmp_path, empty_store):
    table = write_mixed(tmp_path / "mixed", 300)
    texts = pd.read_csv(table)[["note", "kind"]]
    texts["kind"] = [kind[1] for kind in texts["kind"]]
    texts.to_csv(tmp_path / "texts.csv", index=False)
    output = tmp_path / "output"
    with_store(output, empty_store)
    told = searched(
        tmp_path / "texts.csv",
        output,
        "data.task=sequence_classification",
        "data.columns={text: note, label: kind}",
        "data.sequence_length=32",
        "data.near_duplicate_threshold=null",
        "model.base=null",
        "model.vocab_size=400",
        "training.num_train_epochs=20",
        "training.eval_steps=10",
        "training.save_steps=10",
        "automl.budget.trials=1",
    )
    board = board_of(output)
    assert board["best_params"] == {"small encoder": 1.0}
    (metrics,) = [row["metrics"] for row in board["configurations"]]
    # The mood is in one of seven words.
    assert metrics["accuracy"] > 0.8
    assert board["artifact"]["memory_mb"] < 200
    answers = predicted(told, tmp_path / "texts.csv", output, tmp_path / "answers.jsonl")
    assert len(answers) == 300
    given, answered = answered_example(output, named(told))
    assert given == answered > 0
