"""torchrun that reports how each rank ended: `python -m ...agent.torchrun EXITS OPTION...`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from steadytrain.components.shared.lifeline import die_with_parent


def main(exits: str, *options: str) -> int:
    """Run torchrun. If ranks fail, write {rank: exit status}, the earliest failure first."""
    die_with_parent()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # torchrun would log its own traceback when a rank fails, and import torch's compiler for it.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun(list(options))
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        Path(exits).write_text(json.dumps({rank: item.exitcode for rank, item in failures}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
