"""The scaling policy: the same training on fewer and on more GPUs of its kind, by formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.train.plan.fit import works
from steadytrain.components.train.plan.machine import Job
from steadytrain.components.train.plan.offer import Offer, offer_of
from steadytrain.components.train.plan.time_cost import by_table

_MOST_IN_A_NODE: Final = 8


@dataclass(frozen=True)
class Size:
    """GPUs of one kind, and what they would do; None: it does not work on so many."""

    nodes: int
    gpus_per_node: int
    offer: Offer | None


def scaling(job: Job) -> list[Size]:
    """Within a node by its GPUs, else by nodes, up to twice as many as are asked for."""
    return [_size(job, nodes, per_node) for nodes, per_node in _sizes(job)]


def policy(job: Job, sizes: Sequence[Size]) -> str:
    """What follows for a run, in a sentence."""
    if not any(size.offer for size in sizes):
        return "on none of these numbers does it work"
    stays = f"the global batch stays {job.global_batch}, and with it what is learned"
    nodes = job.machine.nodes
    if nodes == 1:
        return stays
    fewest = min(size.nodes for size in sizes if size.offer)
    if fewest >= nodes:
        return f"on fewer nodes it does not work, so it waits where some are lost; {stays}"
    return (
        f"where nodes stay away it can go on with {fewest} (recovery.min_nodes={fewest}); {stays}"
    )


def _sizes(job: Job) -> Iterator[tuple[int, int]]:
    nodes, per_node = job.machine.nodes, job.machine.per_node
    if nodes == 1:
        yield from ((1, count) for count in _doubled(per_node, _MOST_IN_A_NODE))
    else:
        yield from ((count, per_node) for count in _doubled(nodes, 2 * nodes))


def _doubled(asked: int, most: int) -> list[int]:
    """1, 2, 4 and so on, and what is asked for."""
    counts = {asked, *(2**power for power in range(most.bit_length()))}
    return sorted(count for count in counts if count <= max(most, asked))


def _size(job: Job, nodes: int, per_node: int) -> Size:
    there = job.on(job.machine.gpu, nodes, per_node)
    choice = works(there)
    offer = offer_of(there, choice, by_table(there, choice)) if choice else None
    return Size(nodes, per_node, offer)
