"""Each kind of connection failure has its own message and fix."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from steadytrain.components.shared.errors import BadInput, ServerError
from steadytrain.components.shared.kubeflow import client
from steadytrain.components.shared.kubeflow.connection import IN_CLUSTER, connect
from steadytrain.pipelines import cli

from support.kfp_server import Kfp, serving
from support.ports import free_port

TOKEN = "opaque-" + "t" * 30


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(client, "_SECONDS", (300, 300))


@contextlib.contextmanager
def answering(answers, *, certificate=None):
    """Serve fixed answers: path prefix -> (status, content type, body, headers)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            found = next((answers[path] for path in answers if self.path.startswith(path)), None)
            status, kind, body, headers = found or (404, "text/plain", "404 page not found", {})
            self.send_response(status)
            for name, value in {"Content-Type": kind, **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def page(status=200, headers=None):
    return (status, "text/html; charset=utf-8", "<html>Log in</html>", headers or {})


def data(text, status=200):
    return (status, "application/json", text, {})


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, path = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext"
    subprocess.run(
        [*command.split(), "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", path],
        check=True,
        capture_output=True,
    )
    return path, key


@pytest.mark.parametrize(
    ("answers", "words", "remedy"),
    [
        ({}, "no Kubeflow Pipelines API", "/apis/v2beta1"),
        ({"/apis/v1beta1/healthz": data("{}")}, "a version 1", "upgrade"),
        ({"/": page()}, "a web page instead of data", "KFP_COOKIE"),
        ({"/": page(302, {"Location": "/dex/auth"})}, "to another address", "KFP_COOKIE"),
        ({"/": data('{"code":16,"message":"no"}', 401)}, "does not accept", "KFP_EXISTING_TOKEN"),
        ({"/": data('{"code":7,"message":"not for you"}', 403)}, "not for you", "--namespace"),
        ({"/": (403, "text/plain", "RBAC: access denied", {})}, "RBAC: access", "--namespace"),
        ({"/": page(500)}, "failed: Internal Server Error", "log of the ml-pipeline pod"),
        ({"/": data("{}", 418)}, "rejected the request: I'm a Teapot", "fix what it names"),
    ],
)
def test_response_not_from_kfp_is_an_error(answers, words, remedy):
    with answering(answers) as address, pytest.raises(ServerError, match=words) as raised:
        connect(f"http://{address}")
    assert remedy in raised.value.remedy
    assert "<html>" not in str(raised.value)


def test_closed_port_is_an_error():
    with pytest.raises(ServerError, match="connection refused") as raised:
        connect(f"http://127.0.0.1:{free_port()}")
    assert raised.value.passing


def test_unknown_host_is_an_error():
    with pytest.raises(ServerError, match=r"no-such-host\.invalid cannot be resolved") as raised:
        connect("http://no-such-host.invalid/pipeline")
    assert "port-forward" in raised.value.remedy


def test_silent_server_is_an_error(monkeypatch):
    monkeypatch.setattr(client, "_SECONDS", (0.3, 0.3))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ServerError, match="no answer in time") as raised:
            connect(address)
    assert raised.value.passing


def test_broken_connection_is_an_error():
    def hang_up(server):
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=hang_up, args=[server], daemon=True).start()
        with pytest.raises(ServerError, match="the connection broke"):
            connect(f"http://127.0.0.1:{server.getsockname()[1]}")


def test_unknown_certificate_authority_is_an_error(certificate, monkeypatch):
    healthy = {"/apis/v2beta1/healthz": data("{}")}
    with answering(healthy, certificate=certificate) as address:
        with pytest.raises(ServerError, match="self-signed certificate") as raised:
            connect(f"https://{address}")
        assert "SSL_CERT_FILE" in raised.value.remedy
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        assert connect(f"https://{address}/").host == f"https://{address}"


def test_tls_to_a_plain_server_is_an_error():
    with answering({}) as address, pytest.raises(ServerError, match="no secure connection"):
        connect(f"https://{address}")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("", "is missing"),
        ("kubeflow.example", "not an http"),
        ("ftp://kubeflow.example", "not an http"),
        ("http://[", "not an http"),
        ("http://kubeflow.example:many", "not an http"),
        ("http://kubeflow.example:99999", "not an http"),
        ("https://me:hunter2@kubeflow.example", "contains a password"),
    ],
)
def test_invalid_address_is_an_error(host, words):
    with pytest.raises(BadInput, match=words) as raised:
        connect(host)
    assert "hunter2" not in str(raised.value)


def test_address_comes_from_the_environment_or_the_cluster(kfp, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ServerError, match=IN_CLUSTER):
        connect()
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", kfp.address)
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", "https://kubeflow.example/_/pipeline/")
    server = connect()
    assert server.host == kfp.address
    assert server.link("runs", "1") == "https://kubeflow.example/_/pipeline/#/runs/details/1"


def test_token_is_sent_and_a_wrong_one_rejected(monkeypatch):
    with serving(Kfp(token=TOKEN)) as kfp:
        with pytest.raises(ServerError, match="without token or cookie"):
            connect(kfp.address)
        monkeypatch.setenv("KFP_EXISTING_TOKEN", "another-" + TOKEN)
        with pytest.raises(ServerError, match="does not accept the token") as raised:
            connect(kfp.address)
        assert TOKEN not in str(raised.value)
        monkeypatch.setenv("KFP_EXISTING_TOKEN", TOKEN)
        assert connect(kfp.address)


def test_cluster_token_is_reread_for_each_call(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(path))
    with serving(Kfp(token=TOKEN)) as kfp:
        server = connect(kfp.address)
        path.write_text("renewed")
        kfp.token = "renewed"
        assert server.experiments.experiment_service_list_experiments().experiments == []


def test_create_request_is_never_repeated(kfp):
    server = connect(kfp.address)
    kfp.fail_next = [("POST", 503)]
    with pytest.raises(ServerError, match="503"):
        server.experiments.experiment_service_create_experiment(experiment={"display_name": "e"})
    assert kfp.writes() == ["POST /apis/v2beta1/experiments"]


@pytest.mark.slow
def test_command_reports_it_in_two_lines(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["steadytrain", "submit", "causal-lm", "--set", "output=/x"])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 2
    assert "port-forward" in capsys.readouterr().err


def test_help_names_where_credentials_come_from():
    shown = CliRunner().invoke(cli.app, ["submit", "--help"]).stdout
    assert "KFP_COOKIE" in shown
    assert "--token" not in shown


def test_step_of_a_pipeline_can_connect(kfp):
    """In a step, kfp has only what an executor needs, and its client cannot be imported."""
    code = "import kfp.dsl, sys; from steadytrain.components.shared.kubeflow import connection; "
    code += "print(connection.connect(sys.argv[1]).host)"
    runtime = os.environ | {"_KFP_RUNTIME": "true"}
    command = [sys.executable, "-c", code, kfp.address]
    done = subprocess.run(command, env=runtime, capture_output=True, text=True)
    assert done.stdout.strip() == kfp.address, done.stderr
