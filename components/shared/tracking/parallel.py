"""The packages that steadytrain's own sinks need, and the extra that installs each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Final

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.quantities import duration

_NEEDED: Final = {
    "mlflow": ("mlflow", "train"),
    "otlp": ("opentelemetry.exporter", "data"),
    "prometheus": ("prometheus_client", "train"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
}


def is_installed(sink: str) -> bool:
    """Return whether a sink's package is here, without importing it; true for others' sinks."""
    package, _ = _NEEDED.get(sink, ("", ""))
    try:
        return not package or find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def check_package(sink: str) -> None:
    """Check that a sink's package is here.

    Raises:
        BadInput: it is missing; the fix names the extra.
    """
    if not is_installed(sink):
        package, extra = _NEEDED[sink]
        raise BadInput(
            f"the sink {sink!r} needs the package {package.partition('.')[0]}, which is not "
            "installed",
            remedy=f"pip install 'steadytrain[{extra}]', or remove {sink} from tracking.sinks",
        )


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
