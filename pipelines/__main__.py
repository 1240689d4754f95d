"""The `steadytrain` program: `python -m steadytrain.pipelines` is the same command.

It takes the stop signals before it imports anything slow, so that Ctrl-C right after the start
prints no traceback.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command. Until it listens to stop signals itself, they end the process silently."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    from steadytrain.pipelines import cli

    cli.main()


def _leave(number: int, _: FrameType | None) -> None:
    # At once, because an exception would show up as a traceback in the middle of an import.
    os._exit(128 + number)


if __name__ == "__main__":
    main()
