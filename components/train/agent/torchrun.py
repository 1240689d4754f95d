"""torchrun that reports how each rank ended: `python -m ...agent.torchrun NODE RANK OPTION...`.

If torchrun itself fails, for example because another node cannot be reached, it reports that as the
error of this node.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from steadytrain.components.shared.lifeline import die_with_parent
from steadytrain.components.shared.redaction import traceback_of
from steadytrain.components.shared.retry import retry_storage
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.attempt import NodeFolder, RankError


def main(folder: str, rank: str, *options: str) -> int:
    """Run torchrun. If ranks fail, write {rank: exit status}, the earliest failure first.

    Args:
        folder: the node's.
        rank: the node's first, which stands for torchrun if that fails.
    """
    die_with_parent()
    node = NodeFolder(Path(folder))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # torchrun would log its own traceback when a rank fails, and import torch's compiler for it.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun(list(options))
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        _write(node, {rank: item.exitcode for rank, item in failures})
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except Exception as error:
        print(traceback_of(error), end="", file=sys.stderr)
        RankError.of(error, int(rank)).save(node.error)
        _write(node, {int(rank): 1})
        return 1
    return 0


def _write(node: NodeFolder, exits: Mapping[int, int]) -> None:
    retry_storage(
        lambda: LocalStorage(node.path).write(node.torchrun.name, json.dumps(exits).encode())
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
