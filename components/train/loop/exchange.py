"""The ranks' process groups: how long they wait, and objects that ranks exchange in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from steadytrain.components.train.attempt import EVERY_SECONDS, OTHER_RANKS_SECONDS

_PAUSES: Final = (0.0005, 0.05)
_groups: dict[str, dist.ProcessGroup] = {}
"""The group of all ranks for host memory, by the name of the default group."""


def set_longest_wait(seconds: float) -> None:
    """Set how long collectives of groups that are created from now on wait.

    The libraries that a strategy uses create groups of their own, with torch's default: 10 minutes
    for NCCL, which is shorter than a start or a save may take.
    """
    timeout = timedelta(seconds=seconds)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)


def gather_objects(own: list[Any], beat: Callable[[], object] = lambda: None) -> list[Any]:
    """Concatenate the lists of all ranks, on each rank.

    Args:
        own: anything that can be pickled.
        beat: called every second while this rank waits for the others. After OTHER_RANKS_SECONDS it
            is no longer called, so the wait shows up as a hang.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    group = _group()
    _meet(group, beat)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return [item for items in gathered for item in items]


def _meet(group: dist.ProcessGroup, beat: Callable[[], object]) -> None:
    """Wait until all ranks are here."""
    work: Any = dist.barrier(group, async_op=True)
    began = beaten = time.monotonic()
    pause = _PAUSES[0]
    while not work.is_completed():
        now = time.monotonic()
        if now - beaten >= EVERY_SECONDS and now - began < OTHER_RANKS_SECONDS:
            beat()
            beaten = now
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
    work.wait()


def _group() -> dist.ProcessGroup:
    """Return a group of all ranks that exchanges what is in host memory."""
    default = distributed_c10d._get_default_group()
    if dist.get_backend(default) == dist.Backend.GLOO:
        return default
    if default.group_name not in _groups:
        made = dist.new_group(backend="gloo")
        assert isinstance(made, dist.ProcessGroup)
        _groups[default.group_name] = made
    return _groups[default.group_name]
