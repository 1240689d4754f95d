"""Training on two ranks of ZeRO-3 with optimizer states in memory and on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from steadytrain.components.memory import states

from support.strategies import RECIPE, middle, train
from support.training import LLAMA

MODEL = {**LLAMA, "hidden_size": 256, "intermediate_size": 512}
GROUP = 400_000
"""Values of a rank that are moved at a time. Each rank has about 0.7 million, so two groups."""
UNCLIPPED = {**RECIPE, "max_grad_norm": 1e6}
"""With offloading, DeepSpeed adds up the norm that it clips by in another order."""


def compute(offload: str, **settings: str) -> dict[str, Any]:
    """Return the section `compute`."""
    zero = {"strategy": "zero3", "offload": offload, **settings}
    return {"device": "cpu", "nproc_per_node": 2, "threads_per_rank": 1, **zero}


def run_cases(folder: Path, training: dict[str, Any]) -> None:
    """Train on these ranks in memory, on disk, and from either's checkpoint with the other."""
    states.LARGEST_GROUP = GROUP
    found = {}
    for name, offload, start in (
        ("memory", "none", None),
        ("disk", "disk", None),
        ("disk-from-disk", "disk", "disk"),
        ("disk-from-memory", "disk", "memory"),
        ("memory-from-disk", "none", "disk"),
    ):
        path = {"offload_path": str(folder / "files" / name)} if offload == "disk" else {}
        found[name] = train(
            folder / name,
            "zero3",
            offload,
            resume=middle(folder / start) if start else None,
            model={"config": MODEL},
            compute=compute(offload, **path),
            training=UNCLIPPED | training,
        )
    if os.environ["RANK"] == "0":
        (folder / "losses.json").write_text(json.dumps(found))
