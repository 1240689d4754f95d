"""The tracking server of the manifests, run as a process exactly as they specify it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import requests

from steadytrain.pipelines.cluster.doctor import try_tracking

from support.ports import free_port
from support.stores import empty_store
from support.tracking_server import generated_secret, server_process, tracking_server

__all__ = ["empty_store"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("kubectl") is None, reason="needs kubectl, which makes the Secret"
    ),
]
API = "api/2.0/mlflow"


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    return generated_secret(tmp_path_factory.mktemp("secret"))


@pytest.fixture(scope="module")
def server(secret, tmp_path_factory):
    with tracking_server(tmp_path_factory.mktemp("server"), secret) as address:
        yield address


@pytest.fixture
def login(secret):
    return secret["MLFLOW_TRACKING_USERNAME"], secret["MLFLOW_TRACKING_PASSWORD"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"{API}/experiments/search?max_results=1"),
        ("POST", f"{API}/runs/log-batch"),
        ("POST", f"{API}/registered-models/alias"),
        ("POST", f"{API}/users/create"),
        ("GET", "api/2.0/mlflow-artifacts/artifacts"),
        ("PUT", "api/2.0/mlflow-artifacts/artifacts/0/any/file"),
        ("GET", "get-artifact?run_id=0&path=file"),
        ("POST", "graphql"),
        ("GET", "signup"),
        ("GET", ""),
    ],
)
def test_requests_without_a_password_are_rejected(server, method, path):
    assert requests.request(method, f"{server}/{path}", timeout=300).status_code == 401


@pytest.mark.parametrize(
    "known", [("admin", "password"), ("admin", "password1234"), ("steadytrain", "")], ids=":".join
)
def test_well_known_passwords_are_rejected(server, known):
    """The first two are former default passwords of MLflow itself."""
    query = f"{server}/{API}/experiments/search?max_results=1"
    assert requests.get(query, auth=known, timeout=300).status_code == 401


def test_another_name_for_the_server_is_rejected(server, login):
    """A web page in someone's browser can point its own name at this server (DNS rebinding)."""
    query = f"{server}/{API}/experiments/search?max_results=1"
    known = {"timeout": 300, "auth": login}
    assert requests.get(query, **known).status_code == 200
    for host in ("attacker.test", "steadytrain-mlflow.attacker.test:5000"):
        assert requests.get(query, headers={"Host": host}, **known).status_code == 403


def test_our_client_logs_and_reads_with_the_credentials_of_the_secret(server, secret, monkeypatch):
    for key in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(key, secret[key])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    assert try_tracking().state == "pass"
    code = (
        "import mlflow\n"
        "mlflow.set_experiment('probe')\n"
        "with mlflow.start_run() as run:\n"
        "    mlflow.log_metric('loss', 1.5)\n"
        "    mlflow.log_text('kept', 'note.txt')\n"
        "print(run.info.artifact_uri)\n"
        "print(mlflow.artifacts.load_text(f'runs:/{run.info.run_id}/note.txt'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    uri, kept = done.stdout.strip().splitlines()[-2:]
    assert uri.startswith("mlflow-artifacts:/")
    assert kept == "kept"


@pytest.mark.parametrize("place", ["file:///etc", "/etc", "file:///"])
def test_client_cannot_read_server_files_through_artifact_paths(server, login, place):
    """MLflow accepts such a location, but reads only folders in it that are named after runs."""
    made = _post(server, login, "experiments/create", name=place, artifact_location=place)
    run = _post(server, login, "runs/create", **made)["run"]["info"]["run_id"]
    for path in ("passwd", "../../passwd", "../../../etc/passwd", "/etc/passwd", "%2e%2e/passwd"):
        asked = {"run_id": run, "path": path}
        answer = requests.get(f"{server}/get-artifact", params=asked, auth=login, timeout=300)
        assert answer.status_code >= 400
        assert "root:" not in answer.text


def test_artifact_path_on_another_host_is_rejected(server, login):
    """The server would connect to that host with its own credentials."""
    for place in ("http://attacker.test/x", "ftp://attacker.test/x", "hdfs://attacker.test/x"):
        with pytest.raises(requests.HTTPError, match="400"):
            _post(server, login, "experiments/create", name=place, artifact_location=place)


@pytest.mark.parametrize(
    "change",
    [
        {"MLFLOW_TRACKING_PASSWORD": None},
        pytest.param({"MLFLOW_FLASK_SERVER_SECRET_KEY": None}, marks=pytest.mark.long),
        pytest.param(
            {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "password1234"},
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda change: "+".join(change),
)
def test_server_needs_credentials_that_are_not_well_known(tmp_path, secret, change, empty_store):
    """On a cluster, the pod does not even start if a key is missing."""
    told = {key: value for key, value in {**secret, **change}.items() if value is not None}
    command, environment = server_process(tmp_path, told, free_port())
    shutil.copyfile(empty_store, tmp_path / "store" / "mlflow.db")
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=800
    )
    assert done.returncode != 0
    assert "password" in done.stderr or "secret key" in done.stderr


def test_generated_secrets_are_new_and_keep_user_additions(tmp_path, secret):
    other = generated_secret(tmp_path, "HF_TOKEN=abc", "AWS_DEFAULT_REGION=eu-central-1")
    assert other["HF_TOKEN"] == "abc"
    for key in ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_FLASK_SERVER_SECRET_KEY"):
        assert len(secret[key]) == 64
        assert other[key] != secret[key]


def _post(server, login, what, **content):
    answer = requests.post(f"{server}/{API}/{what}", json=content, auth=login, timeout=300)
    answer.raise_for_status()
    return answer.json()
