"""One step for all that follows the training does what the separate ones do."""

from __future__ import annotations

import json

from support.command import TINY_LM


def test_it_ends_with_a_champion(steadytrain):
    done = steadytrain.run("causal-lm", *TINY_LM, "pipeline.fuse=true")
    assert done.code == 0, done.err
    (run,) = done.runs
    assert json.loads((run / "records" / "promote.json").read_text())["champion"]
    assert {path.stem for path in (run / "events").glob("*.jsonl")} >= {
        "evaluate",
        "register",
        "promote",
        "report",
    }
    executed = {path.name for path in (run / "kfp").glob("*/*")}
    assert executed == {"preprocess", "train", "judge", "report"}
