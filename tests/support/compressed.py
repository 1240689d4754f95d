"""Two gloo ranks that compress their gradients: the bytes and the CPU time of a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from support.costed_runs import LARGER, CostedRun
from support.costs import in_turns

RANKS: Final = 2
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "bf16": {"kind": "bf16"},
    "powersgd, rank 4": {"kind": "powersgd", "rank": 4, "start": 2},
    "powersgd, rank 32": {"kind": "powersgd", "rank": 32, "start": 2},
}
_FIRST_STEPS: Final = 4
"""More than PowerSGD's steps with complete gradients."""


def measure(folder: Path, told: Path, rounds: int) -> None:
    """Measure on this rank. Rank 0 writes a table to `told`."""
    runs = {
        name: CostedRun.make(
            folder / os.environ["RANK"] / name,
            "causal_lm",
            LARGER,
            rows=1,
            ranks=RANKS,
            gradient_compression=settings,
        )
        for name, settings in _KINDS.items()
    }
    plain = runs["plain"]
    for run in runs.values():
        for _ in range(_FIRST_STEPS):
            run.step()
    timed = in_turns({name: run.step for name, run in runs.items()}, rounds)
    weights = sum(item.numel() for item in plain.parts.module.parameters())
    lines = [f"{weights / 1e6:.1f}M weights, one row of 128 tokens on each of {RANKS} ranks:"]
    # It does what DDP does without a hook, but from Python, where it can be counted.
    model: Any = plain.parts.strategy.model
    model.register_comm_hook(None, allreduce_hook)
    for name, run in runs.items():
        with _counted() as sent:
            run.step()
        pieces = run.parts.strategy.pieces().get("compression", [])
        kept = sum(piece.bytes for piece in pieces if piece.name.startswith("error-"))
        extra = run.planned.memory.optimizer - plain.planned.memory.optimizer
        lines.append(
            f"  {name:18} {timed[name]} of CPU time; {sum(sent) / 1e6:.2f} MB in a step, in "
            f"{len(sent)} exchanges; {kept / weights:.2f} bytes kept per weight, "
            f"{extra / weights:.2f} by the formula"
        )
    if plain.parts.rank == 0:
        told.write_text("\n".join(lines))


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Yield the bytes of each tensor that Python sums over the ranks."""
    sent: list[int] = []
    reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        sent.append(tensor.nbytes)
        return reduce(tensor, *given, **named)

    dist.all_reduce = counting
    try:
        yield sent
    finally:
        dist.all_reduce = reduce
