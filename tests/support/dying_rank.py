"""A rank of the real loop that is killed right after a checkpoint: `dying_rank.py STEP FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from steadytrain.components.train.checkpoint.store import CheckpointStore
from steadytrain.components.train.loop.main import main

save = CheckpointStore.save


def save_and_die(self: CheckpointStore, step: int, **content: Any) -> int:
    size = save(self, step, **content)
    if step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return size


if __name__ == "__main__":
    CheckpointStore.save = save_and_die  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2]))
