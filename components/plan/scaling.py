"""The scaling policy: the same training run on fewer and on more GPUs of its kind, by formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.plan.offer import Offer, offer_of
from steadytrain.components.sizing.fit import works
from steadytrain.components.sizing.machine import Workload
from steadytrain.components.sizing.time_cost import by_table

_MOST_IN_A_NODE: Final = 8


@dataclass(frozen=True)
class Size:
    """A number of GPUs of one kind, and how they would do; None if the job doesn't work on them."""

    nodes: int
    gpus_per_node: int
    offer: Offer | None


def scaling(job: Workload) -> list[Size]:
    """Return the sizes to compare: one node with up to 8 GPUs, or up to twice the nodes."""
    return [_size(job, nodes, per_node) for nodes, per_node in _sizes(job)]


def policy(job: Workload, sizes: Sequence[Size]) -> str:
    """Return what follows for a run, in one sentence."""
    if not any(size.offer for size in sizes):
        return "none of these sizes works"
    stays = f"the global batch stays {job.global_batch}, so the result does too"
    nodes = job.machine.nodes
    if nodes == 1:
        return stays
    fewest = min(size.nodes for size in sizes if size.offer)
    if fewest >= nodes:
        return f"it does not fit on fewer nodes, so it waits if some are lost; {stays}"
    return (
        f"if nodes stay unavailable, it can continue with {fewest} "
        f"(recovery.min_nodes={fewest}); {stays}"
    )


def _sizes(job: Workload) -> Iterator[tuple[int, int]]:
    nodes, per_node = job.machine.nodes, job.machine.per_node
    if nodes == 1:
        yield from ((1, count) for count in _doubled(per_node, _MOST_IN_A_NODE))
    else:
        yield from ((count, per_node) for count in _doubled(nodes, 2 * nodes))


def _doubled(asked: int, most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and the requested number."""
    counts = {asked, *(2**power for power in range(most.bit_length()))}
    return sorted(count for count in counts if count <= max(most, asked))


def _size(job: Workload, nodes: int, per_node: int) -> Size:
    there = job.on(job.machine.gpu, nodes, per_node)
    choice = works(there)
    offer = offer_of(there, choice, by_table(there, choice)) if choice else None
    return Size(nodes, per_node, offer)
