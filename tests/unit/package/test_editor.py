"""An editor resolves `steadytrain.*` in a fresh checkout, before anything is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BYTECODE = shutil.ignore_patterns("__pycache__")
"""What other tests write meanwhile."""
FILES = ["components/train/step.py", "pipelines/cli.py", "tests/support/training.py"]


def unresolved(folder):
    """Return the modules that pyright can't find with a Python that has no packages."""
    program = Path(sys.executable).with_name("basedpyright")
    bare = Path(sys.base_prefix) / "bin" / "python3"
    done = subprocess.run(
        [program, "--outputjson", "--pythonpath", bare, *FILES],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(FILES), done.stderr
    return {item["message"].split('"')[1] for item in found["generalDiagnostics"]}


@pytest.mark.long
def test_our_own_imports_resolve_in_a_fresh_checkout(tmp_path):
    for name in ("components", "pipelines", "src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=BYTECODE)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    missing = unresolved(tmp_path)
    assert not {name for name in missing if name.startswith(("steadytrain", "support"))}

    shutil.rmtree(tmp_path / "src")
    assert "steadytrain.components.shared.config" in unresolved(tmp_path)
