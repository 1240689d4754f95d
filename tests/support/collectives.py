"""What ranks exchange in a step, and when."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.train.loop.batches import Prefetch
from steadytrain.components.train.loop.control import StopRequests
from steadytrain.components.train.loop.setup import set_up
from steadytrain.components.train.loop.steps import agree, take_step

from support.forked import on_ranks
from support.training import Bench, language_rows, write_data

RANKS, MICRO_BATCH = 2, 2


def recorded(folder: Path, strategy: str, model: Mapping[str, Any], accumulate: int) -> list[str]:
    """Record rank 0 in the last of three steps of `accumulate` micro-batches, in starting order.

    The names are the profiler's: "c10d::..." for collectives, "FSDP::..." for FSDP's own
    operations.
    """
    told = folder / f"{strategy}-{accumulate}.json"
    on_ranks(RANKS, _rank, told, strategy, dict(model), accumulate)
    names: list[str] = json.loads(told.read_text())
    return names


def _rank(told: Path, strategy: str, model: dict[str, Any], accumulate: int) -> None:
    rank = int(os.environ["RANK"])
    folder = told.with_suffix("") / str(rank)
    bench = Bench.make(
        folder,
        write_data(folder / "data", language_rows(60), []),
        model={"config": model},
        training={"global_batch_size": RANKS * MICRO_BATCH * accumulate, "max_steps": 3},
        compute={"nproc_per_node": RANKS, "device": "cpu"},
    )
    parts = set_up(bench.config, bench.data, BatchSettings(MICRO_BATCH, strategy=strategy))
    data = Prefetch(parts)
    for step in range(parts.steps):
        own = data.take(step)
        assert len(own.batches) == accumulate
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            agreed = agree(parts, own, StopRequests(None).flags())
            take_step(
                parts,
                step,
                own.batches,
                agreed.weight,
                limit=math.inf,
                before_update=lambda _: None,
                after_backward=lambda _: None,
            )
    data.close()
    if rank == 0:
        begun = sorted(seen.events(), key=lambda event: event.time_range.start)
        names = [event.name for event in begun if event.name.startswith(("c10d::", "FSDP::"))]
        told.write_text(json.dumps(names))
