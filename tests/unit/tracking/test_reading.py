"""A model that is looked up is found or named, and the look-up creates no store."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from steadytrain.components.register.lineage import LineageStore
from steadytrain.components.shared.errors import BadInput, TrackingError
from steadytrain.components.shared.model_source import content_of, resolve_model
from steadytrain.components.shared.tracking.connect import import_mlflow
from steadytrain.components.shared.workspace import Workspace
from steadytrain.pipelines.cli import app

ADDRESS = "models:/small@champion"


def register(uri, source):
    client = import_mlflow().MlflowClient(uri, uri)
    client.create_registered_model("small")
    version = client.create_model_version("small", source.as_uri())
    client.set_registered_model_alias("small", "champion", version.version)


@pytest.fixture
def logged(tmp_path):
    """Return a folder with the files of a logged model."""
    folder = tmp_path / "logged"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in an empty folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def content(folder):
    return sorted(path for path in folder.rglob("*"))


STORES = {
    "default": "",
    "database": "sqlite:///{}/deep/other.db",
    "folder": "{}/mlruns",
    "address of a folder": "file://{}/deep/mlruns",
}


@pytest.mark.parametrize("look_up", [resolve_model, content_of])
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_failed_look_up_creates_nothing(tmp_path, make_config, here, store, look_up):
    config = make_config(tracking={"uri": store.format(tmp_path)} if store else {})
    before = content(tmp_path)
    with pytest.raises(BadInput, match="no run has been tracked there") as caught:
        look_up(ADDRESS, config)
    assert ADDRESS in caught.value.message
    assert content(tmp_path) == before


@pytest.mark.parametrize("variable", ["MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"])
def test_failed_look_up_creates_no_store_of_the_environment(
    tmp_path, make_config, here, monkeypatch, variable
):
    monkeypatch.setenv(variable, f"sqlite:///{tmp_path}/other.db")
    before = content(tmp_path)
    with pytest.raises(BadInput, match=r"other\.db: no run has been tracked there"):
        resolve_model(ADDRESS, make_config())
    if variable == "MLFLOW_TRACKING_URI":
        with pytest.raises(BadInput, match=r"other\.db: no run has been tracked there"):
            LineageStore(tmp_path)
    assert content(tmp_path) == before


def test_commands_that_look_a_model_up_create_nothing(tmp_path, here):
    for arguments in (
        ["extract", ADDRESS, "part", "new"],
        ["lineage", "small@champion"],
        ["check", "small@champion"],
    ):
        done = CliRunner().invoke(app, [*arguments, "--output", "out"])
        assert isinstance(done.exception, BadInput)
        assert "MLflow store" in done.exception.message
    assert content(here) == []


def test_unfinished_store_has_no_model_and_stays_as_it_is(tmp_path, make_config, here):
    config = make_config()
    store = Workspace.of(config).tracking_store
    store.parent.mkdir(parents=True)
    store.touch()
    before = content(tmp_path)
    with pytest.raises(BadInput, match="no run has been tracked there"):
        resolve_model(ADDRESS, config)
    assert (content(tmp_path), store.stat().st_size) == (before, 0)


def test_model_of_a_store_is_found_and_a_missing_one_changes_nothing(
    make_config, workspace, here, logged
):
    config = make_config()
    with pytest.raises(BadInput, match=r"registry sqlite:.* has no such model"):
        resolve_model(ADDRESS, config)
    assert content(here) == []
    register(f"sqlite:///{workspace.tracking_store}", logged)
    done = CliRunner().invoke(app, ["check", "small@none", "--output", config.output])
    assert isinstance(done.exception, BadInput)
    assert str(workspace.tracking_store) in done.exception.message
    assert "small@none" in done.exception.message
    folder = resolve_model(ADDRESS, config)
    assert [path.name for path in content(folder)] == ["config.json"]
    assert content_of(ADDRESS, config) == f"models:/small/1 at {logged.as_uri()}"


def test_models_of_another_store_are_found_before_a_run_is_tracked(
    tmp_path, make_config, here, empty_store, logged, monkeypatch
):
    registry = tmp_path / "registry.db"
    registry.write_bytes(empty_store.read_bytes())
    register(f"sqlite:///{registry}", logged)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///{registry}")
    config = make_config()
    assert (resolve_model(ADDRESS, config) / "config.json").is_file()
    assert not Workspace.of(config).tracking_store.exists()


def test_server_that_is_down_does_not_look_like_a_missing_model(make_config, server, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError, match="cannot be used"):
        resolve_model(ADDRESS, make_config(tracking={"uri": server.uri}))
