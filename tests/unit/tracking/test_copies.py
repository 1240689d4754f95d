"""A copied or moved output folder, or run folder, leaves the original unchanged."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from mlflow.tracking._tracking_service import utils

from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.records import DataRecord, SideRecord, TrainRecord
from steadytrain.components.shared.stage import ReuseStore
from steadytrain.components.shared.tracking import finish_run, parent_run, use_tracking
from steadytrain.components.shared.tracking.connect import import_mlflow
from steadytrain.components.shared.tracking.notes import identity
from steadytrain.components.shared.tracking.run import read_registry
from steadytrain.components.shared.workspace import Workspace


def content(folder):
    """Return the digest of each file below a folder; locks are always empty or about a process."""
    return {
        path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def track(config, text):
    """Report a run with a report and a registered model; return its workspace and MLflow run."""
    workspace = Workspace.of(config)
    workspace.create()
    workspace.config.write_text(config.to_yaml())
    workspace.report.write_text(text)
    # A process keeps a run's address. What is tracked after a move is tracked by another one.
    utils._artifact_repos_cache.clear()
    run_id = parent_run(config, workspace)
    assert finish_run(config, workspace, ok=True)
    return workspace, run_id


def report_of(config, workspace, run_id):
    client = use_tracking(config, workspace).client
    place = client.get_run(run_id).info.artifact_uri
    assert place.startswith(f"{workspace.tracking_artifacts.as_uri()}/")
    return (Path(place.removeprefix("file://")) / "report" / "report.html").read_text()


def warnings(workspace):
    return [event.message for event in read_events(workspace.events) if isinstance(event, Warned)]


@pytest.fixture
def original(workspace, config):
    """Return a tracked run, which has a registered model."""
    _, run_id = track(config, "original")
    client = use_tracking(config, workspace).client
    client.create_registered_model("small")
    logged = client.create_logged_model(
        client.get_run(run_id).info.experiment_id, name="small", source_run_id=run_id
    )
    files = Path(logged.artifact_location.removeprefix("file://"))
    files.mkdir(parents=True)
    (files / "weights").write_text("original")
    client.finalize_logged_model(logged.model_id, "READY")
    version = client.create_model_version("small", f"models:/{logged.model_id}", run_id)
    client.set_registered_model_alias("small", "champion", version.version)
    return workspace, run_id


@pytest.mark.slow
def test_copied_output_has_a_run_of_its_own(original, make_config):
    first, run_id = original
    copy = first.output.parent / "copy"
    shutil.copytree(first.output, copy)
    before = content(first.output)
    config = make_config(output=str(copy))
    there, own = track(config, "copy")
    assert own != run_id
    assert content(first.output) == before
    assert report_of(config, there, own) == "copy"
    assert report_of(config, there, run_id) == "original"
    copied, moved = sorted(warnings(there), reverse=True)
    assert str(first.tracking_artifacts) in moved
    assert str(there.tracking_artifacts) in moved
    assert f"a copy of run '{first.run_id}' in {first.folder}" in copied
    assert parent_run(config, there) == own


def test_moved_output_continues_its_run(original, make_config):
    first, run_id = original
    moved = first.output.parent / "moved"
    first.output.rename(moved)
    config = make_config(output=str(moved))
    there, same = track(config, "again")
    assert same == run_id
    assert report_of(config, there, run_id) == "again"
    assert not first.output.exists()


@pytest.mark.parametrize("reading", [False, True])
def test_models_of_a_copied_registry_are_its_own(original, make_config, reading):
    first, _ = original
    copy = first.output.parent / "copy"
    shutil.copytree(first.output, copy)
    shutil.rmtree(first.output)
    config = make_config(output=str(copy))
    there = Workspace.of(config)
    client = read_registry(config, there) if reading else use_tracking(config, there).client
    place = client.get_model_version_download_uri("small", "1")
    mlflow = import_mlflow()
    files = Path(mlflow.artifacts.download_artifacts("models:/small@champion"))
    assert files.is_relative_to(copy), place
    assert (files / "weights").read_text() == "original"


def test_run_that_was_copied_inside_an_output_is_another_run(original, make_config):
    first, run_id = original
    second = make_config(run="second")
    shutil.copytree(first.folder, Workspace.of(second).folder)
    known = identity(first)
    there, own = track(second, "second")
    assert own != run_id
    assert identity(there) != known
    assert report_of(second, there, own) == "second"
    assert report_of(second, there, run_id) == "original"
    (warned,) = warnings(there)
    assert f"a copy of run '{first.run_id}'" in warned
    assert "'second' gets a tracking run of its own" in warned


@pytest.mark.slow
def test_copy_on_a_shared_server_is_another_run(lasting_server, make_config):
    shared = {"uri": lasting_server.uri}
    first, run_id = track(make_config(tracking=shared), "original")
    copy = first.output.parent / "copy"
    shutil.copytree(first.output, copy)
    moved = first.output.parent / "moved"
    config = make_config(tracking=shared, output=str(copy))
    _, own = track(config, "copy")
    assert own != run_id
    first.output.rename(moved)
    assert track(make_config(tracking=shared, output=str(moved)), "moved")[1] == run_id


@pytest.mark.slow
def test_output_with_two_names_stays_as_it_is(original, make_config):
    """A link to a folder is not a copy of it."""
    first, run_id = original
    link = first.output.parent / "link"
    link.symlink_to(first.output)
    config = make_config(output=str(link))
    there, same = track(config, "again")
    assert same == run_id
    assert warnings(there) == []
    experiment = use_tracking(config, there).client.get_experiment_by_name(
        config.tracking.experiment
    )
    assert experiment.artifact_location == first.tracking_artifacts.as_uri()


def test_artifacts_that_are_elsewhere_stay_there(original, make_config, tmp_path):
    """The address of an experiment of another output, or on a server, does not change."""
    first, _ = original
    client = use_tracking(make_config(), first).client
    for name, place in (("other", f"{tmp_path.as_uri()}/x/mlartifacts"), ("s3", "s3://bucket/x")):
        client.create_experiment(name, place)
    copy = first.output.parent / "copy"
    shutil.copytree(first.output, copy)
    config = make_config(output=str(copy))
    client = use_tracking(config, Workspace.of(config)).client
    found = {item.name: item.artifact_location for item in client.search_experiments()}
    assert found["other"] == f"{tmp_path.as_uri()}/x/mlartifacts"
    assert found["s3"] == "s3://bucket/x"


def test_records_of_a_copied_output_lead_to_its_own_files(tmp_path):
    first, second = Workspace(tmp_path / "first", "a"), Workspace(tmp_path / "second", "a")
    (first.prepared / "f").mkdir(parents=True)
    (first.prepared / "f" / "rows").write_text("rows")
    first.model.mkdir(parents=True)
    side = SideRecord(shards=[], rows=1, documents=1)
    data = DataRecord(
        folder=str(first.prepared / "f"),
        fingerprint="f",
        task="causal_lm",
        sides={"train": side, "validation": side, "test": side},
        test_records="t",
        split_digest="s",
    )
    data.save(first.record("preprocess"))
    TrainRecord(
        outcome="finished",
        model=str(first.model),
        weights_digest="w",
        metric="loss",
        best_score=1.0,
        best_step=1,
        steps=1,
        attempts=1,
        parameters=1,
        seconds=1.0,
    ).save(first.record("train"))
    ReuseStore(first, "preprocess", DataRecord).remember("k", data, [first.prepared / "f" / "rows"])
    shutil.copytree(first.output, second.output)
    assert DataRecord.load(second.record("preprocess")).folder == str(second.prepared / "f")
    assert TrainRecord.load(second.record("train")).model == str(second.model)
    reused = ReuseStore(second, "preprocess", DataRecord)
    found = reused.find("k", ttl_seconds=1e9)
    assert found is not None
    assert found.folder == str(second.prepared / "f")
    (second.prepared / "f" / "rows").write_text("other")
    assert reused.find("k", ttl_seconds=1e9) is None
