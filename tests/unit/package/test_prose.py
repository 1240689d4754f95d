"""`make lint` rejects phrases that read like a translation, in text and in the names of tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / ".ci" / "prose.py"


@pytest.fixture
def lint(tmp_path):
    """Check a checkout with these files; return the exit status and the lines."""
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "prose.py"
    script.write_text(SCRIPT.read_text())

    def run(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.splitlines()

    return run


@pytest.mark.parametrize(
    ("name", "text", "line", "phrase"),
    [
        ("components/a.py", 'remedy = "restart it, or mend the driver"\n', 1, "mend"),
        ("components/a.py", "# A comment, and the data are\n# prepared anew.\n", 2, "anew"),
        ("components/a.py", 'x = (\n    "the run"\n    f" goes on"\n)\n', 2, "run"),
        ("pipelines/a.py", '"""It goes on\nwith the rest."""\n', 1, "goes on with"),
        ("tests/test_a.py", "\n\ndef test_a_failure_is_told_once():\n", 3, "is told"),
        ("docs/a.md", "# Title\n\nThe file was written for want of space.\n", 3, "for want of"),
        ("README.md", "Nobody works on this.\n", 1, "Nobody works on"),
    ],
)
def test_phrase_is_reported_with_file_line_and_wording(lint, name, text, line, phrase):
    status, found = lint({name: text})
    assert status == 1
    assert found[0].startswith(f"{name}:{line}: '{phrase}")
    assert ": write '" in found[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("components/a.py", "# A training run has a training loss. Amend the plan.\n"),
        ("components/a.py", "recommended = told = 1\n"),
        ("CONTRIBUTING.md", "| mend the error | fix the error |\n"),
    ],
)
def test_plain_text_and_the_table_of_examples_pass(lint, name, text):
    assert lint({name: text}) == (0, [])
