"""The ranks of an attempt as processes, however they were started."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from steadytrain.components.train.agent.processes import processes_of


def ranks_of(folder: Path) -> list[psutil.Process]:
    """Return an attempt's processes that write a rank's log, the lowest rank first."""
    found = {}
    for process in processes_of(folder):
        log = Path(f"/proc/{process.pid}/fd/1").readlink()
        if match := re.fullmatch(r"rank-(\d+)\.log", log.name):
            found[int(match[1])] = process
    return [found[rank] for rank in sorted(found)]
