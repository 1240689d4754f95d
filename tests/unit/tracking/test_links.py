"""The KFP run and the MLflow run link to each other."""

from __future__ import annotations

import urllib.request

import pytest

from steadytrain.components.shared.kubeflow import connection
from steadytrain.components.shared.tracking import (
    parent_run,
    run_links,
    use_tracking,
    version_link,
)


def test_local_store_has_no_pages(config, workspace):
    run_id = parent_run(config, workspace)
    assert run_links(config, workspace) == {"mlflow_run_id": run_id}
    assert version_link(config, workspace, "model", "3") == {}


def test_server_has_pages(make_config, lasting_server, workspace):
    server = lasting_server
    config = make_config(tracking={"uri": server.uri})
    run_id = parent_run(config, workspace)
    experiment = use_tracking(config, workspace).experiment_id
    found = run_links(config, workspace)
    page = f"{server.uri}/#/experiments/{experiment}/runs/{run_id}"
    assert found == {"mlflow_run_id": run_id, "mlflow_run": page}
    assert version_link(config, workspace, "model", "3") == {
        "mlflow_version": f"{server.uri}/#/models/model/versions/3"
    }
    with urllib.request.urlopen(page, timeout=300) as answer:
        assert answer.status == 200


def test_credentials_in_the_address_are_not_shown(make_config, workspace):
    config = make_config()
    uri = "https://me:secret@mlflow.test/"
    tracking = config.tracking.model_copy(update={"uri": uri})
    config = config.model_copy(update={"tracking": tracking})
    (link,) = version_link(config, workspace, "model", "3").values()
    assert link == "https://mlflow.test/#/models/model/versions/3"


@pytest.mark.parametrize("ui", ["", "https://kubeflow.test/pipeline/"])
def test_run_is_tagged_with_kfps(config, workspace, monkeypatch, ui):
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", ui)
    monkeypatch.setattr(connection, "this_pod_name", lambda: "preprocess-1")
    tags = connection.run_tags("0a1b")
    run_id = parent_run(config, workspace, tags)
    found = use_tracking(config, workspace).client.get_run(run_id).data.tags
    assert found["kubeflow.run_id"] == "0a1b"
    page = "https://kubeflow.test/pipeline/#/runs/details/0a1b" if ui else None
    assert found.get("kubeflow.run_url") == page


@pytest.mark.parametrize(("job", "pod"), [("", "preprocess-1"), ("0a1b", "")])
def test_no_tags_outside_a_pipeline(monkeypatch, job, pod):
    monkeypatch.setattr(connection, "this_pod_name", lambda: pod)
    assert connection.run_tags(job) == {}
