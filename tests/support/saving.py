"""Ranks as threads that save checkpoints together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from steadytrain.components.train.checkpoint.saver import Saver, State
from steadytrain.components.train.checkpoint.snapshot import cut

SECONDS = 600


class World:
    """Ranks as threads, with a collective operation that waits for all of them."""

    def __init__(self, size):
        self.size, self.barrier = size, threading.Barrier(size)
        self.given = [None] * size
        self.rank = threading.local()

    def gather(self, items):
        self.given[self.rank.number] = items
        self.barrier.wait(SECONDS)
        found = [item for given in self.given for item in given]
        self.barrier.wait(SECONDS)
        return found

    def run(self, work):
        """Return what `work(rank)` returns or raises, in rank order."""

        def rank(number):
            self.rank.number = number
            try:
                return work(number)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(rank, range(self.size)))


def tensors(value=1.0):
    return {
        "model": {"weight": torch.full((8, 5), value), "seen": torch.tensor(value)},
        "optimizer": {"weight/exp_avg": torch.full((8, 5), value / 2)},
    }


def state(value=1.0, rank=0, ranks=1, **changes):
    parts = {
        part: cut(found, rank, ranks, on_first={"seen"})
        for part, found in (tensors(value) | changes).items()
    }
    return State(parts, shared={"value": value}, own={})


def saver(world, rank, store, told=None):
    return Saver(
        store,
        rank=rank,
        world_size=world.size,
        gather=world.gather,
        on_saved=(told if told is not None else []).append,
    )
