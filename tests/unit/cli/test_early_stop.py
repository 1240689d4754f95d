"""Ctrl-C right after the start, while the command still imports its modules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

SLOW = """
import time
print("importing", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stop_during_imports_ends_silently(tmp_path, number, status):
    (tmp_path / "typer.py").write_text(SLOW)
    child = subprocess.Popen(
        [sys.executable, "-m", "steadytrain.pipelines", "list"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "importing\n"
    child.send_signal(number)
    assert child.communicate(timeout=300) == ("", "")
    assert child.returncode == status


def test_ignored_signal_stays_ignored(tmp_path):
    # Shells that start background jobs ignore SIGINT for them.
    (tmp_path / "typer.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n1/0"
    )
    done = subprocess.run(
        [sys.executable, "-m", "steadytrain.pipelines", "list"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert "ZeroDivisionError" in done.stderr
