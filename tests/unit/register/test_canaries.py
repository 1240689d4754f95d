"""Secrets that failing code shows appear in no output of a step: streams, events, or report."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steadytrain.components.shared.workspace import Workspace

from support.leaking import CANARY, ENVIRONMENT

TESTS = Path(__file__).resolve().parents[2]


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "steadytrain.pipelines.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_outputs_of_a_leaking_step_hold_no_secret(trained, tmp_path):
    data = {"source": ["shapes"], "task": "support.leaking:LEAKING"}
    config = trained("leaking", 0.8, data=data)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    failed = command("step", "evaluate", str(path))
    assert failed.returncode != 0
    shown = failed.stdout + failed.stderr
    reported = command("step", "report", str(path))
    assert reported.returncode == 0, reported.stderr
    assert CANARY not in shown + reported.stdout + reported.stderr
    workspace = Workspace.of(config)
    events = "".join(file.read_text() for file in workspace.events.iterdir())
    # The message itself is shown. Only the secrets are redacted.
    assert "RuntimeError" in events
    assert "[redacted]" in events
    assert workspace.report.is_file()
    leaks = [
        file.relative_to(tmp_path).as_posix()
        for file in tmp_path.rglob("*")
        if file.is_file() and CANARY.encode() in file.read_bytes()
    ]
    assert leaks == []
