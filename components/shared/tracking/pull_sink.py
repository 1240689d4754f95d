"""Sinks that pull: a thread reads the run's events from its files and sends what others lack.

Nothing waits in memory, and nothing is lost if this process dies: the next sink, or the end of the
run, continues where this one stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Final, Protocol, TypedDict

from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.periodic import Periodic
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.retry import FOREVER, Retry, any_error
from steadytrain.components.shared.tracking.notes import warn
from steadytrain.components.shared.workspace import Workspace

BATCH_SECONDS = 2.0
CLOSE_SECONDS, CLOSE_SECONDS_UNANSWERED = 15.0, 3.0
FIRST_DELAY_SECONDS, LAST_DELAY_SECONDS = 2.0, 60.0
TRAINING_CONTINUES: Final = (
    "training continues, and what is missing is sent when that works again, or at the end of the "
    "run"
)


class Delivers(Protocol):
    """Sends a run's events somewhere."""

    def catch_up(self, *, give_up: Callable[[], bool]) -> object:
        """Send what is missing there. Stop if `give_up` returns true before a batch.

        Raises:
            SteadytrainError: it was not accepted. Nothing is lost: a later call sends it.
        """


class SinkTiming(TypedDict, total=False):
    """How long a sink may take, as arguments of `PullSink`."""

    batch_seconds: float
    close_seconds: float


class PullSink:
    """A sink that never slows down or blocks training.

    Args:
        receiver: whom it sends to, for messages.
        workspace: the run's workspace.
        open_delivery: called before the first event is sent, and again after an error. Raises
            SteadytrainError if the receiver cannot be reached.
        around: entered by the thread while it works.
        batch_seconds: how long to collect events before sending them.
        close_seconds: how long `close` waits for the remaining events.
        promise: completes the warning that the receiver does not accept something.
    """

    def __init__(
        self,
        receiver: str,
        workspace: Workspace,
        open_delivery: Callable[[], Delivers],
        *,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        batch_seconds: float = BATCH_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
        promise: str = TRAINING_CONTINUES,
    ) -> None:
        self.receiver, self.workspace, self.open_delivery = receiver, workspace, open_delivery
        self.close_seconds, self.promise = close_seconds, promise
        self._abandoned = threading.Event()
        self._delivery: Delivers | None = None
        self._retry = Retry(
            transient=any_error,
            seconds=FOREVER,
            delays=(FIRST_DELAY_SECONDS, LAST_DELAY_SECONDS),
            report=self._warn,
        )
        self._warned = False
        name = f"{receiver.lower()}-sink"
        self._thread = Periodic(
            name, self._send_if_due, every=batch_seconds, finish=self._send, around=around
        )

    def close(self) -> None:
        """Send the rest within `close_seconds`, or less if the receiver did not respond."""
        limit = self.close_seconds
        if self._retry.failures:
            limit = min(limit, CLOSE_SECONDS_UNANSWERED)
        if not self._thread.end(limit):
            self._abandoned.set()
            self._warn(f"{self.receiver} has not answered for {duration(limit)}")

    def _send_if_due(self) -> None:
        if self._retry.due:
            self._send()

    def _send(self) -> None:
        """Send what is missing. After an error, wait before the next try, longer each time."""
        try:
            if self._delivery is None:
                self._delivery = self.open_delivery()
            self._delivery.catch_up(give_up=self._abandoned.is_set)
        except SteadytrainError as error:
            self._delivery = None
            self._retry.may_pass(error)
        else:
            self._retry.reset()

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warn(self.workspace, f"{reason}; {self.promise}")


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
