"""The fused step after training gives the same results as the separate steps."""

from __future__ import annotations

import json

import pytest

from support.command import COMPILED, TINY_LM


@pytest.mark.long
def test_fused_pipeline_ends_with_a_champion(steadytrain, tmp_path):
    """It has two ranks. A run leaves nothing in TMPDIR."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    fused = ("pipeline.fuse=true", "compute.nproc_per_node=2")
    done = steadytrain.run("causal-lm", *TINY_LM, *fused, TMPDIR=str(scratch))
    assert done.code == 0, done.err
    assert {path.name for path in scratch.iterdir()} <= {COMPILED}
    (run,) = done.runs
    assert json.loads((run / "records" / "promote.json").read_text())["champion"]
    assert {path.stem for path in (run / "events").glob("*.jsonl")} >= {
        "evaluate",
        "register",
        "promote",
        "report",
    }
    executed = {path.name for path in (run / "kfp").glob("*/*")}
    assert executed == {"preprocess", "train", "evaluate-and-register", "report"}
