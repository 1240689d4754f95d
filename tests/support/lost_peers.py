"""Ranks that lose another one: real processes, a real SIGKILL, and what the survivors report."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from steadytrain.components.train.attempt import AttemptFolder, RankError

from support.forked import _PRELOAD
from support.ports import free_port
from support.training import TEST_ENVIRONMENT

SECONDS = 120
"""How long a collective waits."""
VICTIM = 1


def all_reduce(dist, tensor):
    dist.all_reduce(tensor)


def all_gather(dist, tensor):
    dist.all_gather([tensor.clone() for _ in range(dist.get_world_size())], tensor)


def reduce_scatter(dist, tensor):
    parts = tensor.repeat(dist.get_world_size())
    dist.reduce_scatter_tensor(tensor, parts)


def broadcast(dist, tensor):
    for rank in range(dist.get_world_size()):
        dist.broadcast(tensor, rank)


def barrier(dist, tensor):
    dist.barrier()


def monitored_barrier(dist, tensor):
    dist.monitored_barrier(timeout=timedelta(seconds=SECONDS))


def object_gather(dist, tensor):
    from steadytrain.components.train.loop.exchange import gather_objects

    gather_objects([dist.get_rank()])


def send_and_receive(dist, tensor):
    to = (dist.get_rank() + 1) % dist.get_world_size()
    sent = dist.isend(tensor, to)
    dist.recv(tensor.clone())
    sent.wait()


def store(dist, tensor):
    """Use the store, whose host is the victim."""
    dist.distributed_c10d._get_default_store().add("count", 1)
    time.sleep(0.01)


def store_wait(dist, tensor):
    """Wait for what only the others would write."""
    found = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == VICTIM:
        time.sleep(0.01)
    else:
        found.wait(["never"], timedelta(seconds=SECONDS))


COLLECTIVES = (
    all_reduce,
    all_gather,
    reduce_scatter,
    broadcast,
    barrier,
    monitored_barrier,
    object_gather,
    send_and_receive,
)
STORES = (store, store_wait)


def survivors(
    folder: Path, work: Callable[[Any, Any], None], *, ranks: int = 2, host: int = 0
) -> list[RankError]:
    """Let ranks repeat some work until one of them is killed. Return what the others report.

    Args:
        host: the rank that holds the store.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (str(folder), ranks, free_port(), work.__name__, host)
    started = [
        context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)
    ]
    for process in started:
        process.start()
    try:
        started[VICTIM].join(600)
        for process in started:
            process.join(600)
        assert started[VICTIM].exitcode == -signal.SIGKILL
        assert all(process.exitcode is not None for process in started)
    finally:
        for process in started:
            process.kill()
            process.join()
    return AttemptFolder(folder).errors()


def _rank(rank: int, folder: str, ranks: int, port: int, work: str, host: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(TEST_ENVIRONMENT)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    held = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == host, timeout=timeout)
    dist.init_process_group("gloo", store=held, rank=rank, world_size=ranks, timeout=timeout)
    dist.barrier()
    tensor = torch.ones(64)
    try:
        for turn in range(100_000):
            if rank == VICTIM and turn == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            globals()[work](dist, tensor)
    except Exception as error:
        RankError.of(error, rank).save(AttemptFolder(Path(folder)).error(rank))
