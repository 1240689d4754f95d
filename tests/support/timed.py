"""Runs a benchmark's training in processes forked after all imports, and measures it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.ports import free_port

_PRELOAD = [
    "support.throughput",
    "support.class_throughput",
    "steadytrain.components.train.loop.training",
    "transformers",
]


@dataclass(frozen=True)
class Found:
    """The results of one training run, measured by its rank 0.

    tokens: real tokens of all ranks, without padding.
    seconds, cpu_seconds: time of training alone.
    memory: peak bytes above the memory in use before training.
    loss: mean over the held-out texts, in float32.
    data_wait: share of the time spent waiting for data; -1 means unknown.
    communication_wait: share of the time that ranks waited for each other; -1 means unknown.
    """

    tokens: int
    seconds: float
    cpu_seconds: float
    memory: int
    loss: float
    data_wait: float = -1.0
    communication_wait: float = -1.0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_speed(self) -> float:
        """Tokens per CPU second: the speed on a machine that nobody shares."""
        return self.tokens / self.cpu_seconds


def in_processes(
    folder: Path, train: Callable[..., Found], *given: Any, ranks: int = 1, threads: int = 1
) -> Found:
    """Run `train(folder, *given)` on each rank with its threads; return rank 0's result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    folder.mkdir(parents=True)
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, threads, folder, train, given))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks, folder.name
    return Found(**json.loads((folder / "found.json").read_text()))


def _rank(
    rank: int,
    ranks: int,
    port: int,
    threads: int,
    folder: Path,
    train: Callable[..., Found],
    given: Any,
) -> None:
    import torch

    torch.set_num_threads(threads)
    if ranks > 1:
        # The variables that torchrun sets.
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    found = train(folder, *given)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(asdict(found)))


def measured(train: Callable[[], Any], tokens: int, loss: Callable[[], float]) -> Found:
    """Train, then compute the loss on the held-out texts."""
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak.
    before, began, cpu = _memory("VmRSS"), time.perf_counter(), time.process_time()
    train()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    memory = _memory("VmHWM") - before
    return Found(tokens, seconds, cpu_seconds, memory, loss())


def _memory(name: str) -> int:
    told = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert told
    return int(told[1]) * 1024


def median_ratio(ours: Sequence[Found], peer: Sequence[Found], by: str = "cpu_speed") -> float:
    """Return the median over the rounds of our speed divided by the peer's."""
    return statistics.median(
        getattr(one, by) / getattr(other, by) for one, other in zip(ours, peer, strict=True)
    )


def table(found: dict[str, list[Found]], by: str = "cpu_speed") -> str:
    """Format medians and ranges of speed, ratio, memory and loss; the first kind is ours."""
    ours = next(iter(found.values()))
    lines = []
    for kind, each in found.items():
        speeds = sorted(getattr(one, by) for one in each)
        ratios = sorted(
            getattr(one, by) / getattr(other, by) for one, other in zip(ours, each, strict=True)
        )
        lines.append(
            f"  {kind:20} {statistics.median(speeds):7.0f} tokens/s "
            f"({speeds[0]:.0f} to {speeds[-1]:.0f}), ours {median_ratio(ours, each, by):5.2f} x "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"{max(one.memory for one in each) / 1e6:6.0f} MB more at the peak, "
            f"loss {each[0].loss:.3f}"
        )
    return "\n".join(lines)
