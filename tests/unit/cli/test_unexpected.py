"""How the command ends after an unexpected error, on real file descriptors."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

_PROGRAM = """
import sys, tempfile
from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines.unexpected import exit_with_status

with exit_with_status():
    {body}
"""
TOKEN = "hf_" + "q" * 34


def ending(body, *, arguments=(), **options):
    """Run a process that ends inside the handler for unexpected errors."""
    command = [sys.executable, "-c", _PROGRAM.format(body=body), *arguments]
    environment = {**os.environ, **options.pop("env", {})}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run(command, env=environment, timeout=600, **options)


def test_defect_has_an_id_and_a_log_without_secrets(tmp_path):
    body = (
        "password = 'pw-9f3k2'; import os; "
        "raise ValueError(f'password={password} {os.environ[\"HF_TOKEN\"]} '"
        " + os.environ['MY_SECRET'] + ' https://me:pw-in-url@host')"
    )
    secrets = {"HF_TOKEN": TOKEN, "MY_SECRET": "plain words 42"}
    arguments = ["run", "--set", "tracking.api_key=pw-argument"]
    done = ending(body, arguments=arguments, env={**secrets, "TMPDIR": str(tmp_path)})
    assert done.returncode == 70
    assert "Traceback" not in done.stderr
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    identity = re.search(r"id (E-[0-9a-f]{8})", done.stderr)[1]
    assert str(log) in done.stderr
    assert identity in text
    assert "Traceback" in text
    assert "command   " in text
    for secret in ("pw-9f3k2", TOKEN, "plain words 42", "pw-in-url", "pw-argument"):
        assert secret not in text + done.stderr
    assert log.stat().st_mode & 0o777 == 0o600


def test_same_defect_has_the_same_id(tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    first, again, other = (
        re.search(r"E-[0-9a-f]{8}", ending(body, env=env).stderr)[0]
        for body in ("1 / 0", "[][0]; 1 / 0".replace("[][0]; ", ""), "[][0]")
    )
    assert first == again != other


def test_unwritable_log_is_not_a_second_failure():
    done = ending("tempfile.tempdir = '/proc'; 1 / 0")
    assert done.returncode == 70
    assert "there is no log" in done.stderr
    assert "E-" in done.stderr
    assert "Traceback" not in done.stderr


def test_removed_folder_for_temporary_files_is_named(tmp_path):
    folder = tmp_path / "removed"
    folder.mkdir()
    body = "import os; os.rmdir(tempfile.gettempdir()); tempfile.mkdtemp()"
    done = ending(body, env={"TMPDIR": str(folder)})
    assert done.returncode == 1
    assert f"the folder for temporary files, {folder}, was removed" in done.stderr
    assert "bug" not in done.stderr


def test_limit_of_memory_is_named():
    body = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, -1)); bytes(1 << 31)"
    done = ending(body)
    assert done.returncode == 1
    assert "memory ran out; `ulimit -v` limits its memory to 1.07 GB" in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("raise BadInput('no', remedy='do')", 2, "error: no\n  fix: do\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise SystemExit(3)", 3, ""),
        ("sys.exit('told')", 1, "told\n"),
        ("print('x')", 0, ""),
    ],
)
def test_expected_errors_keep_their_exit_status(body, status, words):
    done = ending(body)
    assert (done.returncode, done.stderr) == (status, words)


def test_output_that_cannot_be_written_is_reported():
    for body in ("print('x')", "print('x', flush=True)", "print('x' * 100_000)"):
        with open("/dev/full", "w") as full:  # noqa: PTH123
            done = ending(body, stdout=full)
        assert done.returncode == 1
        assert done.stderr == "error: standard output cannot be written: No space left on device\n"


def test_closed_pipe_ends_the_command_silently():
    reading, writing = os.pipe()
    os.close(reading)
    for body in ("print('x')", "print('x' * 1_000_000)"):
        done = ending(body, stdout=writing)
        assert (done.returncode, done.stderr) == (1, "")
    os.close(writing)


def test_closed_descriptors_are_not_reused():
    done = ending(
        "print('x'); sys.stderr.write('y'); sys.exit(open('/dev/null').fileno() - 3)",
        preexec_fn=lambda: (os.close(0), os.close(1), os.close(2)),
    )
    assert done.returncode == 0


def test_message_that_cannot_be_written_keeps_the_exit_status():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        assert ending("raise BadInput('no')", stderr=full).returncode == 2
        assert ending("1 / 0", stderr=full).returncode == 70


def test_unencodable_text_is_escaped():
    done = ending("print('\\U0001f600 \\udcff')", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "\\U0001f600 \\udcff\n")


def test_command_that_continues_without_output_keeps_its_exit_status():
    body = (
        "import contextlib; from steadytrain.pipelines.local import silence\n"
        "    with contextlib.suppress(OSError): print('x', flush=True)\n"
        "    silence()"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = ending(body, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
