"""How long the process groups of a strategy's ranks wait."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.train.loop.exchange import gather_objects
from steadytrain.components.train.loop.setup import set_up

from support.forked import on_ranks
from support.training import Bench, language_rows, write_data

RANKS = 2


def waits(folder: Path, strategies: tuple[str, ...]) -> dict[str, float]:
    """Return the timeout in seconds of each group on rank 0, by the group's description."""
    on_ranks(RANKS, _rank, folder, strategies)
    found: dict[str, float] = json.loads((folder / "waits.json").read_text())
    return found


def _rank(folder: Path, strategies: tuple[str, ...]) -> None:
    import torch
    from torch.distributed import distributed_c10d

    rank = int(os.environ["RANK"])
    data = write_data(folder / f"data-{rank}", language_rows(60), [])
    for strategy in strategies:
        bench = Bench.make(
            folder / f"{strategy}-{rank}",
            data,
            training={"global_batch_size": RANKS, "max_steps": 1},
            compute={"nproc_per_node": RANKS, "device": "cpu"},
        )
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        set_up(bench.config, bench.data, BatchSettings(1, strategy=strategy))
    torch.distributed.new_group()
    if rank == 0:
        found = {
            name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group, name in distributed_c10d._world.pg_names.items()
        }
        (folder / "waits.json").write_text(json.dumps(found))


def late_gather(folder: Path) -> None:
    """Gather objects on this rank; rank 0 writes what it got.

    The last rank comes only after rank 0 has given two signs of life.
    """
    import torch.distributed as dist

    rank, beats, alive = int(os.environ["RANK"]), list[int](), folder / "alive"

    def beat() -> None:
        beats.append(1)
        if len(beats) == 2:
            alive.touch()

    dist.init_process_group("gloo")
    gather_objects([rank])
    while rank == RANKS - 1 and not alive.exists():
        time.sleep(0.05)
    found = gather_objects([{"rank": rank}], beat)
    if rank == 0:
        (folder / "gathered.json").write_text(json.dumps(found))
    dist.barrier()
