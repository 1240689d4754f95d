"""Work that must not delay a run: in threads, all at the same time, and abandoned if it hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from steadytrain.components.shared.quantities import duration


def run_in_parallel(
    works: Mapping[str, Callable[[], object]], seconds: Callable[[str], float]
) -> dict[str, BaseException]:
    """Do all the work at the same time, each for at most its seconds.

    Args:
        works: by name.
        seconds: returns how long to wait for a name, from the start of all of them.

    Returns:
        The errors by name: what the work raised, or TimeoutError if it is not done.
    """
    failures: dict[str, BaseException] = {}

    def guarded(name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (Exception, SystemExit) as error:
            failures[name] = error

    threads = {
        name: threading.Thread(target=guarded, args=(name, work), name=name, daemon=True)
        for name, work in works.items()
    }
    started = time.monotonic()
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, started + seconds(name) - time.monotonic()))
    late = {
        name: TimeoutError(f"not done within {duration(seconds(name))}")
        for name, thread in threads.items()
        if thread.is_alive()
    }
    return {**failures, **late}
