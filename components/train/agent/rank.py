"""Becomes a rank: `python -m ...agent.rank FOLDER COMMAND...`.

Its output goes to the attempt's folder, and it dies with whoever started it:
a launcher killed without warning leaves no rank behind.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from steadytrain.components.shared.parent import die_with_parent
from steadytrain.components.train.attempt import AttemptFolder


def main(folder: str, *command: str) -> None:
    """Redirects the output, then turns this process into `command`."""
    die_with_parent()
    log = AttemptFolder(Path(folder)).log(int(os.environ.get("RANK", "0")))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
