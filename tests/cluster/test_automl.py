"""A search whose units are jobs on the cluster, and the loss of a unit's pod and the driver's."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from kubernetes import client

from steadytrain.components.train.launch.naming import RUN
from steadytrain.components.tune.trials.cluster import STUDY

from support.launched import CONFIG, OUTPUT
from support.tables import shipped

TABLE = f"{OUTPUT}/table.csv"
UNITS = 8
SEARCH = {
    "name": "wine",
    "output": OUTPUT,
    "data": {
        "source": [TABLE],
        "target": "target",
        "task": "tabular_classification",
        "validation_share": 0.1,
        "test_share": 0.2,
    },
    "model": {"framework": "lightgbm", "config": {"model_type": "lightgbm"}},
    "automl": {
        "quality": "fast",
        "budget": {"units": UNITS, "parallel": 2},
        "constraints": {"frameworks": ["sklearn"]},
    },
    "compute": {**CONFIG["compute"], "nodes": 1},
    "recovery": CONFIG["recovery"],
}
MEASURED = {"fit_seconds", "latency_p50_ms", "latency_p99_ms"}


@pytest.fixture(scope="module")
def searches(launched):
    launched.write(TABLE, shipped("wine").to_csv(index=False))
    return replace(launched, config=SEARCH)


def board_of(searches, study):
    board = json.loads(searches.read(f"../studies/{study}/board.json"))
    rows = [
        {name: value for name, value in row.items() if name not in MEASURED}
        for row in board["configurations"]
    ]
    kept = ("best_params", "best_score", "corrected_score", "trials", "trials_completed")
    return {"rows": rows} | {name: board[name] for name in kept}


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
    searches,
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
    # Its units are processes of the step's own pod.
    searches.start("searched-quietly", step="search", compute={"launcher": "process"})
    phase, log = searches.end("searched-quietly", 900)
    assert phase == "Succeeded", log
    board = board_of(searches, "searched")
    assert board["trials"] == board["trials_completed"] == UNITS
    assert board == board_of(searches, "searched-quietly")
    for number in range(UNITS):
        assert searches.left(f"searched-{number:04d}") == []
    assert not pods_of(namespace, **{STUDY: "searched"})
