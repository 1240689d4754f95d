from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, TrackingError
from steadytrain.components.shared.tracking import check_tracking, resolve_uri, use_tracking
from steadytrain.components.shared.tracking.connect import (
    import_mlflow,
    short_timeouts,
    shown,
    tracking_errors,
)
from steadytrain.components.shared.workspace import Workspace

MakeConfig = Callable[..., RunConfig]


def test_store_comes_from_configuration_environment_or_output(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace.of(make_config())
    assert resolve_uri(make_config(), workspace) == f"sqlite:///{workspace.output}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert resolve_uri(make_config(), workspace) == "http://tracking:5000"
    stated = make_config(tracking={"uri": "http://other:5000"})
    assert resolve_uri(stated, workspace) == "http://other:5000"


def test_mlflow_points_at_the_store_and_the_environment_stays(
    config: RunConfig, workspace: Workspace
) -> None:
    before = dict(os.environ)
    tracking = use_tracking(config, workspace)
    mlflow = import_mlflow()
    assert mlflow.get_tracking_uri() == f"sqlite:///{workspace.tracking_store}"
    assert mlflow.get_registry_uri() == f"sqlite:///{workspace.tracking_store}"
    experiment = tracking.client.get_experiment_by_name("steadytrain")
    assert experiment.experiment_id == tracking.experiment_id
    assert experiment.artifact_location == workspace.tracking_artifacts.as_uri()
    added = {name for name in os.environ if name not in before}
    assert not added & {"MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_ID"}
    assert use_tracking(config, workspace).experiment_id == tracking.experiment_id


def test_registry_may_be_another_store(
    config: RunConfig, workspace: Workspace, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = f"sqlite:///{empty_store}"
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", registry)
    use_tracking(config, workspace)
    assert import_mlflow().get_registry_uri() == registry


def test_deleted_experiment_is_named(config: RunConfig, workspace: Workspace) -> None:
    tracking = use_tracking(config, workspace)
    tracking.client.delete_experiment(tracking.experiment_id)
    with pytest.raises(TrackingError, match=r"'steadytrain'.*has been deleted"):
        check_tracking(config, workspace)


def test_given_run_sets_the_experiment(
    config: RunConfig, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = use_tracking(config, workspace).client
    elsewhere = client.create_experiment("elsewhere")
    monkeypatch.setenv("MLFLOW_RUN_ID", client.create_run(elsewhere).info.run_id)
    assert use_tracking(config, workspace).experiment_id == elsewhere


@pytest.mark.parametrize("variable", ["MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"])
def test_environment_names_the_experiment_if_the_configuration_does_not(
    make_config: MakeConfig, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    config, named = make_config(), make_config(tracking={"experiment": "mine"})
    client = use_tracking(config, workspace).client
    elsewhere = client.create_experiment("elsewhere")
    monkeypatch.setenv(variable, "elsewhere" if variable.endswith("NAME") else elsewhere)
    assert use_tracking(config, workspace).experiment_id == elsewhere
    assert use_tracking(named, workspace).experiment_id != elsewhere
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "777")
    with pytest.raises(BadInput, match=r"MLFLOW_EXPERIMENT_ID = '777': sqlite:.* no such ex"):
        check_tracking(config, workspace)


@pytest.mark.parametrize("absent", ["0" * 32, "../0"])
def test_given_run_that_is_not_there_is_rejected(
    config: RunConfig, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", absent)
    with pytest.raises(BadInput, match=f"MLFLOW_RUN_ID = '{absent}'") as refused:
        check_tracking(config, workspace)
    assert "unset it" in refused.value.remedy


def refusal(make_config: MakeConfig, uri: str) -> TrackingError:
    config = make_config(tracking={"uri": uri})
    workspace = Workspace.of(config)
    workspace.create()
    with pytest.raises(TrackingError) as refused:
        check_tracking(config, workspace)
    return refused.value


def test_server_that_is_down(make_config: MakeConfig) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
        error = refusal(make_config, uri)
    assert error.message.startswith(f"the tracking store {uri} cannot be used")
    assert error.message.endswith("Connection refused")
    assert "start the server" in error.remedy


def test_server_that_hangs(
    make_config: MakeConfig, silent_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert refusal(make_config, silent_uri).message.endswith("no answer in time")


def test_server_that_hangs_past_every_request_limit(
    make_config: MakeConfig, silent_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.components.shared.tracking.connect.CHECK_SECONDS", 1.0)
    assert "has not answered for 1 s" in refusal(make_config, silent_uri).message


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, "You are not authenticated"),
        (403, '{"error_code": "PERMISSION_DENIED", "message": "no"}'),
        (404, "<html>some other service</html>"),
        (200, "<html>some other service</html>"),
        (500, "broken"),
    ],
)
def test_server_that_refuses_or_is_something_else(
    make_config: MakeConfig,
    answer: Callable[[int, str], str],
    status: int,
    body: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = answer(status, body)
    assert f"the tracking store {uri} cannot be used" in refusal(make_config, uri).message


def test_credentials_are_never_printed(
    make_config: MakeConfig, answer: Callable[[int, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = answer(401, "denied for user:hunter2").replace("://", "://user:hunter2@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "letmein")
    config = make_config()
    workspace = Workspace.of(config)
    workspace.create()
    with pytest.raises(TrackingError) as refused:
        check_tracking(config, workspace)
    assert "hunter2@" not in str(refused.value)
    assert "letmein" not in str(refused.value)


@pytest.mark.parametrize("password", ["Sup3r#Tail9", "Sup3r?Tail9", "12345/Sup3r", "Sup3r/Tail9"])
@pytest.mark.parametrize("scheme", ["postgresql", "mysql+pymysql", "http"])
def test_password_that_breaks_the_address_is_not_printed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, scheme: str, password: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{scheme}://bob:{password}@127.0.0.1:9/db")
    config = make_config()
    workspace = Workspace.of(config)
    workspace.create()
    with pytest.raises(TrackingError) as refused:
        check_tracking(config, workspace)
    assert "Sup3r" not in str(refused.value)
    assert "Tail9" not in str(refused.value)


def test_unknown_kind_of_store(make_config: MakeConfig) -> None:
    assert "gopher://store" in refusal(make_config, "gopher://store").message


@pytest.mark.parametrize(
    ("uri", "printed"),
    [
        ("http://user:word@host:5000/path?token=1#x", "http://host:5000/path"),
        ("http://token@host", "http://host"),
        ("sqlite:////tmp/mlflow.db", "sqlite:////tmp/mlflow.db"),
        ("sqlite:////home/a@b/mlflow.db", "sqlite:////home/a@b/mlflow.db"),
        ("postgresql://user:a#b?c/d@e@host/db?sslmode=x", "postgresql://host/db"),
        ("postgresql://user:12345/word@host/db", "postgresql://host/db"),
        ("http://user:wo?rd@host/path", "http://host/path"),
        ("http://user:\nword@host/", "http://host/"),
        ("http:\\\\user:word@host/", "http:\\\\host/"),
    ],
)
def test_addresses_are_shown_without_credentials(uri: str, printed: str) -> None:
    assert shown(uri) == printed


def test_long_reasons_are_cut_to_a_line() -> None:
    with pytest.raises(TrackingError) as raised, tracking_errors("http://host"):
        raise ValueError("\n" + "x" * 1000 + "\nsecond line")
    assert len(raised.value.message) < 400
    assert "second line" not in raised.value.message


def test_timeouts_from_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    with short_timeouts():
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


@pytest.mark.slow
def test_nothing_is_printed_and_mlflow_is_imported_late(tmp_path: Path) -> None:
    program = f"""
import sys
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.tracking import check_tracking, parent_run
from steadytrain.components.shared.workspace import Workspace
assert "mlflow" not in sys.modules
config = from_mapping({{
    "name": "small", "output": {str(tmp_path)!r}, "data": {{"source": ["x"]}},
    "model": {{"config": {{"model_type": "gpt2"}}}},
}})
workspace = Workspace.of(config)
workspace.create()
check_tracking(config, workspace)
parent_run(config, workspace)
assert "torch" not in sys.modules
"""
    environment = {name: value for name, value in os.environ.items() if "MLFLOW" not in name}
    environment |= {"PATH": "/nonexistent", "CLAUDECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["a b", "a?b", "a%20b", "100%", "a#b", "übung", "a?b=c&d#e;f %3F"])
def test_output_may_have_any_name(
    make_config: MakeConfig, tmp_path: Path, empty_store: Path, name: str
) -> None:
    config = make_config(output=str(tmp_path / name))
    workspace = Workspace.of(config)
    workspace.create()
    workspace.tracking_store.write_bytes(empty_store.read_bytes())
    tracking = use_tracking(config, workspace)
    run = tracking.client.create_run(tracking.experiment_id)
    tracking.client.log_text(run.info.run_id, "content", "folder/file.txt")
    found = tracking.client.download_artifacts(run.info.run_id, "folder/file.txt")
    assert Path(found).read_text() == "content"
    assert any(path.name == "file.txt" for path in workspace.tracking_artifacts.rglob("*"))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [name]
    assert workspace.tracking_store.read_bytes() != empty_store.read_bytes()


@pytest.mark.slow
def test_store_is_created_in_an_output_of_any_name(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(output=str(tmp_path / "a b?c%20d#eü"))
    workspace = Workspace.of(config)
    workspace.create()
    check_tracking(config, workspace)
    assert workspace.tracking_store.is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["a b?c%20d#eü"]
