"""The shell completes commands, options, runs, presets, files and fields."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def complete(tmp_path):
    """Return what bash would offer after a line, in a folder with two runs and some files."""
    for name in ("runs/first", "runs/second"):
        (tmp_path / "steadytrain-output" / name).mkdir(parents=True)
    (tmp_path / "other" / "runs" / "third").mkdir(parents=True)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()

    def offered(line):
        words = line.split(" ")
        done = subprocess.run(
            [Path(sys.executable).with_name("steadytrain")],
            cwd=tmp_path,
            env={
                **os.environ,
                "_STEADYTRAIN_COMPLETE": "complete_bash",
                "COMP_WORDS": line,
                "COMP_CWORD": str(len(words) - 1),
            },
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stderr
        return done.stdout.split()

    return offered


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("steadytrain resu", ["resume"]),
        ("steadytrain explain ", ["first", "second"]),
        ("steadytrain explain s", ["second"]),
        ("steadytrain explain --output other ", ["third"]),
        ("steadytrain explain --output nowhere ", []),
        ("steadytrain run mi", ["mine.yaml"]),
        ("steadytrain run cau", ["causal-lm"]),
        ("steadytrain run chat --set training.max_s", ["training.max_steps="]),
        (
            "steadytrain run chat --set model.adapter.fr",
            ["model.adapter.frozen_embeddings=", "model.adapter.frozen_head="],
        ),
    ],
)
def test_tab_completes(complete, line, offered):
    assert complete(line) == offered
