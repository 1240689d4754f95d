"""One rank of the doctor's check: it meets the others and exchanges tensors with them.

Each line of its output is a stage that it reached, as JSON; lines of NCCL stand between them.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import time
from typing import Any, Final

import torch
import torch.distributed as dist

SMALL: Final = 8
LARGE: Final = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes of an all-reduce that shows the latency, and of one that shows the bandwidth."""
_REPEATS: Final = {SMALL: 20}
_FEW: Final = 5
_WARM_UP: Final = 2


def report(stage: str, **about: Any) -> None:
    """Print the stage that this rank enters, at once."""
    rank = int(os.environ["RANK"])
    print(json.dumps({"rank": rank, "stage": stage, "host": socket.gethostname(), **about}))
    sys.stdout.flush()


def reduced(size: int, device: str) -> float:
    """Return the mean seconds of an all-reduce of `size` bytes, whose sum is checked.

    Raises:
        RuntimeError: the sum is wrong.
    """
    tensor = torch.ones(size // 4, dtype=torch.float32, device=device)
    dist.all_reduce(tensor)
    if not bool((tensor == dist.get_world_size()).all()):
        raise RuntimeError(f"an all-reduce of ones gave {tensor.min()} to {tensor.max()}")
    for _ in range(_WARM_UP):
        dist.all_reduce(tensor.fill_(1))
    repeats = _REPEATS.get(size, _FEW)
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main(seconds: float) -> None:
    """Take part in the check, for so many seconds at most."""
    here, local = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    backend, device = "gloo", "cpu"
    if torch.cuda.is_available() and torch.cuda.device_count() >= here:
        backend, device = "nccl", f"cuda:{local}"
        torch.cuda.set_device(local)
    large = LARGE[device.partition(":")[0]]
    report("joining", backend=backend)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))
    report("latency")
    latency = reduced(SMALL, device)
    report("bandwidth", bytes=large)
    took = reduced(large, device)
    report("finished", latency=latency, seconds=took, bytes=large, backend=backend)
    dist.destroy_process_group()


if __name__ == "__main__":
    report("started")
    main(float(sys.argv[1]))
