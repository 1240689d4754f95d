"""The doctor's trial pod: what it receives, and what its program reports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from steadytrain.pipelines.cluster import trial as module
from steadytrain.pipelines.cluster.trial import Trial
from steadytrain.pipelines.pod_names import NAME, TRACKING

from support.ports import free_port


def pod():
    from kubernetes import client

    made = module._pod(Trial("MLflow", "image:1", ["true"], lambda *_: pytest.fail("not run")))
    return client.ApiClient().sanitize_for_serialization(made)


def test_trial_pod_references_credentials_by_secret():
    (container,) = pod()["spec"]["containers"]
    assert container["env"] == [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": NAME, "key": key, "optional": True}}}
        for key in TRACKING
    ]


def test_trial_pod_has_no_token_and_writes_only_to_a_bounded_tmp():
    spec = pod()["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "state", "words"),
    [
        ("", "not asked", "no MLFLOW_TRACKING_URI"),
        ("http://user:hunter2secret@127.0.0.1:{port}", "fail", "http://127.0.0.1:"),
    ],
    ids=["no-address", "nobody-listens"],
)
def test_pod_output_becomes_the_doctors_line(address, state, words, tmp_path):
    environment = {"PATH": "", "HOME": str(tmp_path), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    if address:
        environment["MLFLOW_TRACKING_URI"] = address.format(port=free_port())
    program = [sys.executable, "-m", "steadytrain.pipelines.cluster.doctor"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = module._judge_tracking("Succeeded", done.stdout, "some-namespace")
    assert (line.topic, line.state) == ("MLflow", state)
    assert words in line.text
    assert line.remedy
    assert "hunter2secret" not in done.stdout


def test_failed_pod_is_reported():
    line = module._judge_tracking("Failed", "Traceback ...\nModuleNotFoundError: x", "ns")
    assert line.state == "fail"
    assert "ModuleNotFoundError" in line.text


def test_library_output_before_the_line_is_ignored():
    told = json.dumps({"topic": "MLflow", "state": "pass", "text": "good", "remedy": ""})
    assert module._judge_tracking("Succeeded", f"a warning\n{told}\n", "ns").state == "pass"
