"""The compiled pipeline `automl`, and a search whose units are jobs, and which loses pods."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import replace
from urllib.parse import urlencode

import pytest
from kubernetes import client

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.operations import PipelineConfig
from steadytrain.components.train.launch.naming import RUN
from steadytrain.components.tune.search import STUDY
from steadytrain.pipelines.compile import compile_pipeline, read_pipeline
from steadytrain.pipelines.server.submission import Submission

from support.launched import SEARCH, TABLE, UNITS
from support.searched import without_times
from support.tables import shipped
from support.walker import Walker


@pytest.fixture(scope="module")
def searches(launched):
    launched.write(TABLE, shipped("wine").to_csv(index=False))
    return replace(launched, config=SEARCH)


@pytest.fixture(scope="module")
def piped(searches, mlflow, tmp_path_factory):
    """Run the compiled pipeline on the table; return its study and the states of its tasks.

    The units of its search are processes of the step's own pod.
    """
    config = from_mapping({**SEARCH, "compute": {"launcher": "process"}})
    sent = Submission.of(config, pipeline="automl")
    path = tmp_path_factory.mktemp("compile") / "automl.yaml"
    compile_pipeline(path, pipeline="automl", shape=PipelineConfig(fuse=True))
    walker = Walker(searches.cluster, *read_pipeline(path), job=str(uuid.uuid4()))
    walker.run(**sent.parameters)
    return sent.config.run, walker.states


def test_pipeline_registers_a_model_that_its_board_and_its_report_show(searches, mlflow, piped):
    study, states = piped
    assert states.keys() >= {"preprocess", "search", "train-winner", "report"}
    assert set(states.values()) == {"done"}
    board = read(searches, study)
    scores = {row["name"]: row["score"] for row in board["configurations"]}
    assert scores["linear"] < scores["dummy"]
    assert board["best_params"].keys() == {"linear"}
    # The winner's own run measured this on the test side.
    gate = json.loads(searches.read(f"{board['run']}/records/gate.json"))
    assert board["test"]["compared"] == gate["compared"] == len(scores) == 2
    assert board["test"]["metrics"][gate["metric"]]["value"] == gate["candidate"]
    assert board["test"]["promoted"]
    page = searches.read(f"../studies/{study}/report.html")
    assert "opened once, after 2 configurations were compared" in page
    query = urlencode({"name": "wine", "alias": "champion"})
    answer = searches.cluster.ask(mlflow, f"api/2.0/mlflow/registered-models/alias?{query}")
    assert answer["model_version"]["version"] == "1"


def read(searches, study):
    return json.loads(searches.read(f"../studies/{study}/board.json"))


def board_of(searches, study):
    board = read(searches, study)
    return without_times(board) | {name: board[name] for name in ("trials", "trials_completed")}


def pods_of(namespace, **labels):
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    return client.CoreV1Api().list_namespaced_pod(namespace, label_selector=selector).items


def until(found, seconds=300):
    deadline = time.monotonic() + seconds
    while not (seen := found()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return seen


def test_search_that_lost_the_pods_of_a_unit_and_of_its_driver_has_the_board_of_a_quiet_one(
    searches, piped
):
    namespace = searches.cluster.namespace
    searches.start("searched", step="search", pod="searched-1")
    (pod, *_) = until(lambda: pods_of(namespace, **{RUN: "searched-0000"}))
    searches.kill(pod.metadata.name)
    until(lambda: pods_of(namespace, **{RUN: "searched-0004"}))
    searches.kill("searched-1")
    searches.start("searched", step="search", pod="searched-2")
    phase, log = searches.end("searched-2", 900)
    assert phase == "Succeeded", log
    board = board_of(searches, "searched")
    assert board["trials"] == board["trials_completed"] == UNITS
    assert board == board_of(searches, piped[0])
    for number in range(UNITS):
        assert searches.left(f"searched-{number:04d}") == []
    assert not pods_of(namespace, **{STUDY: "searched"})
