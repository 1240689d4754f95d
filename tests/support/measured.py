"""Run a command to completion and measure its wall time, CPU time and peak memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psutil

_SAMPLE_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Measured:
    """cpu: CPU seconds of all its processes.
    peak: peak of their resident bytes, counting shared pages once.
    """

    seconds: float
    cpu: float
    peak: int


def measured(command: Sequence[str], **environment: str) -> Measured:
    """Run a command that must succeed; show its log only if it fails."""
    began, peak = time.monotonic(), 0
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, env=os.environ | environment, stderr=log)
        process = psutil.Process(child.pid)
        while True:
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
            if ended:
                break
            peak = max(peak, resident(process))
            time.sleep(_SAMPLE_SECONDS)
        child.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        assert child.returncode == 0, log.read().decode(errors="replace")[-4000:]
    return Measured(time.monotonic() - began, usage.ru_utime + usage.ru_stime, peak)


def resident(process: psutil.Process) -> int:
    """Return the resident bytes of a process and its children, including pages of mapped files."""
    total = 0
    try:
        for one in (process, *process.children(recursive=True)):
            total += one.memory_full_info().pss
    except psutil.Error:
        # One of the processes has just ended.
        return 0
    return total
