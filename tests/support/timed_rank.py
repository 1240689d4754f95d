"""A rank that leaves the CPU seconds of its training thread in its attempt's folder."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from steadytrain.components.train.loop.main import main
from steadytrain.components.train.loop.training import Training

PROGRAM: Final = (sys.executable, "-m", "support.timed_rank")
_FILE = "cpu-seconds.json"


def marks_of(attempt: Path) -> list[float]:
    """Return the CPU seconds that the thread had used after each step of an attempt."""
    found: list[float] = json.loads((attempt / _FILE).read_text())
    return found


def _timed(folder: str) -> int:
    marks: list[float] = []
    step = Training._step

    def marked(*given: Any) -> None:
        step(*given)
        marks.append(time.thread_time())

    Training._step = marked
    status = main(folder)
    Path(folder, _FILE).write_text(json.dumps(marks))
    return status


if __name__ == "__main__":
    sys.exit(_timed(sys.argv[1]))
