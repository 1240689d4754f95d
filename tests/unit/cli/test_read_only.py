"""An output folder that the user can only read, under an account that does not own it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from steadytrain.components.shared.config import from_mapping

from support.written_run import Writer

NOBODY = 65534


@pytest.fixture(scope="module")
def output():
    """The folder of a failed run that nobody can write to, outside of any private folder."""
    place = Path(tempfile.mkdtemp(prefix="steadytrain-read-only-"))
    content = {"data": {"source": ["a.txt"]}, "model": {"config": {"model_type": "llama"}}}
    run = Writer(from_mapping({**content, "name": "tiny", "run": "2024", "output": str(place)}))
    run.again()
    run.start_step("preprocess")
    run.fail("preprocess", "DataError", "no data", "give some")
    Writer(run.config.model_copy(update={"run": "2025"}))
    for folder, _, files in os.walk(place):
        Path(folder).chmod(0o555)
        for name in files:
            Path(folder, name).chmod(0o444)
        if os.geteuid() == 0:
            for path in (folder, *(Path(folder, name) for name in files)):
                os.chown(path, NOBODY, NOBODY)
    yield place
    for folder, _, _ in os.walk(place):
        Path(folder).chmod(0o755)
    shutil.rmtree(place)


def powerless():
    """Drop the capabilities that let root read and write files of other users."""
    for capability in (0, 1, 2, 3):  # chown, dac_override, dac_read_search, fowner
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP


def steadytrain(*arguments, cwd="/", **environment):
    """Run the command under an account that owns nothing in the folder."""
    other = {"preexec_fn": powerless} if os.geteuid() == 0 else {}
    return subprocess.run(
        [sys.executable, "-m", "steadytrain.pipelines.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "HOME": "/nonexistent", **environment},
        timeout=300,
        **other,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list"], "2024"),
        (["explain", "2024"], "no data"),
        (["stop", "2024"], "2024 is not running"),
        (["compare", "2024", "2025"], "2024 has no scores on the test side"),
        (["gc", "--dry-run", "--idle-hours", "0"], "nothing to remove"),
    ],
)
def test_reading_commands_work_on_a_read_only_file_system(output, arguments, words):
    done = steadytrain(*arguments, "--output", output)
    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["resume", "report"])
def test_writing_commands_say_what_they_cannot_write(output, command):
    done = steadytrain(command, "2024", "--output", output)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr
    assert str(output) in done.stderr
    assert "fix: " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["config.yaml", "events", ""])
def test_unreadable_file_is_reported(output, hidden):
    path = output / "runs" / "2024" / hidden if hidden else output
    before = path.stat().st_mode
    path.chmod(0)
    try:
        for arguments in (["list"], ["explain", "2024"], ["resume", "2024"], ["gc", "--dry-run"]):
            done = steadytrain(*arguments, "--output", output)
            assert done.returncode in (0, 1, 2)
            assert "Traceback" not in done.stderr
            assert "unexpected" not in done.stderr
            assert done.stdout or done.stderr
            # Typer checks the option itself. Its message names the option and the path.
            told = "fix: " in done.stderr or "Invalid value for '--output'" in done.stderr
            assert done.returncode == 0 or told
    finally:
        path.chmod(before)


@pytest.mark.slow
def test_folder_of_runs_that_may_not_be_read_is_named(output):
    folder = output / "runs"
    before = folder.stat().st_mode
    folder.chmod(0)
    try:
        done = steadytrain("top", "--output", output)
    finally:
        folder.chmod(before)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"'{folder}' cannot be read: no permission" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("folder", ["/nonexistent", "/proc", "x" * 300])
def test_bad_temporary_folder_is_skipped(tmp_path, folder):
    done = steadytrain("submit", "causal-lm", "--set", "output=/mnt", "--dry-run", TMPDIR=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pipeline " in done.stdout


def test_doctor_works_in_a_removed_folder(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    inside = os.open(gone, os.O_RDONLY)
    gone.rmdir()
    done = steadytrain("doctor", cwd=f"/proc/self/fd/{inside}")
    os.close(inside)
    assert "error: the current folder has been removed\n  fix: " in done.stderr
    assert done.returncode == 2
