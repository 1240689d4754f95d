"""What a failed rank reports, for tests of its classification."""

from __future__ import annotations

from steadytrain.components.train.attempt import RankError


def reported(kind, message, *, rank=0, time=1.0):
    return RankError(
        rank=rank, time=time, kind=kind, message=message, traceback=f"Traceback of {rank}", step=5
    )
