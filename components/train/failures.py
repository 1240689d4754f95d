"""Failure classification: one class per failure, determined from what the ranks left behind.

The errors that training raises are here too, because their names decide the class.

A plugin that fails is named while it runs (`naming`).
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import SteadytrainError, Stopped
from steadytrain.components.shared.events.types import Cause
from steadytrain.components.shared.foreign import DEVICE_TEXTS, NOT_MAPPED
from steadytrain.components.shared.output_log import Output
from steadytrain.components.train.attempt import RankError, names_of


class Diverged(SteadytrainError):
    """The loss or gradient norm is not finite, or the loss spiked far above the recent losses.

    limit: the highest loss that would still be normal, if the loss spiked; None otherwise.
    """

    def __init__(
        self, step: int, loss: float, grad_norm: float, *, limit: float | None = None
    ) -> None:
        spiked = "" if limit is None else f" (a spike: above {limit:.4g})"
        super().__init__(
            f"training diverged at step {step}: loss {loss}{spiked}, gradient norm {grad_norm}",
            remedy="lower training.learning_rate, lengthen training.warmup_steps, or look for "
            "defective records",
        )
        self.step, self.loss = step, loss


class NonFiniteState(Diverged):
    """A weight or an optimizer value is not finite, although loss and gradients were.

    step: the step after which it was found.
    """

    def __init__(self, step: int, tensor: str) -> None:
        SteadytrainError.__init__(
            self,
            f"training diverged at step {step}: {tensor} contains a value that is not finite, "
            "and it was not saved",
            remedy="lower training.learning_rate, or look for defective records",
        )
        self.step, self.loss, self.tensor = step, math.nan, tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.tensor)


class CannotRecompute(SteadytrainError):
    """Memory is too small, and the model does not support activation checkpointing."""


class CompiledCodeDamaged(SteadytrainError):
    """Code that an earlier attempt compiled is damaged."""

    def __init__(self, folder: Path, error: BaseException) -> None:
        super().__init__(
            f"{folder}: compiled code of an earlier attempt is damaged and was removed: "
            f"{type(error).__name__}: {error}",
            remedy="start the run again; it compiles the code again",
        )


class FailureClass(StrEnum):
    """Every class of training failure."""

    GPU_OOM = "gpu_oom"
    HOST_OOM = "host_oom"
    PREEMPTION = "preemption"
    NODE_LOST = "node_lost"
    HANG = "hang"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    NETWORK = "network"
    STORAGE = "storage"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    DIVERGENCE = "divergence"
    DATA = "data"
    USER_BUG = "user_bug"
    PENDING_TIMEOUT = "pending_timeout"
    CRASH = "crash"
    UNKNOWN = "unknown"

    @property
    def retryable(self) -> bool:
        """Whether a retry of the same work can succeed."""
        return self not in {FailureClass.DATA, FailureClass.USER_BUG}

    @property
    def remedy(self) -> str:
        """What the user can do about it."""
        return _REMEDIES[self]


_RESTART = "start the run again; it continues from the newest checkpoint"
_REMEDIES = {
    FailureClass.GPU_OOM: "lower training.micro_batch_size (the global batch stays the same), "
    "set training.gradient_checkpointing, or shorten "
    f"data.sequence_length; then {_RESTART}",
    FailureClass.HOST_OOM: "give the machine or the pod more memory (and more /dev/shm), raise "
    "`ulimit -v` if the shell sets it, or use fewer workers (compute.nproc_per_node); then "
    f"{_RESTART}",
    FailureClass.PREEMPTION: _RESTART,
    FailureClass.NODE_LOST: "if this happens again, check the machine (network, the GPU's ECC "
    f"errors); {_RESTART}",
    FailureClass.HANG: f"check the ranks' logs for what they waited for; {_RESTART}",
    FailureClass.COLLECTIVE_TIMEOUT: "check the logs for a rank that was slow or missing; "
    + _RESTART,
    FailureClass.NETWORK: f"check the network and the host names; {_RESTART}",
    FailureClass.STORAGE: f"free space, or grant access to the path in the message; {_RESTART}",
    FailureClass.CHECKPOINT_CORRUPT: "remove the checkpoint in the message, so that the run uses "
    f"the one before it; {_RESTART}",
    FailureClass.DIVERGENCE: "lower training.learning_rate, raise training.warmup_steps, or look "
    "for broken records in the data card; use another run name",
    FailureClass.DATA: "find the records in the message in the data card, fix the data or their "
    "configuration, and start again",
    FailureClass.USER_BUG: f"fix the error; the traceback shows where. Then {_RESTART}",
    FailureClass.PENDING_TIMEOUT: "request fewer or other machines, or wait until some are free",
    FailureClass.CRASH: "a native library crashed: read the end of the logs; if it crashes again "
    f"at the same step, check that batch and the driver and library versions; {_RESTART}",
    FailureClass.UNKNOWN: "read the traceback or the end of the logs: if it is an error of yours, "
    f"fix it; {_RESTART}",
}

# Exceptions whose name determines the class. For all others, the text does.
_KINDS = {
    "OutOfMemoryError": FailureClass.GPU_OOM,
    "MemoryError": FailureClass.HOST_OOM,
    "StorageError": FailureClass.STORAGE,
    "Unreadable": FailureClass.STORAGE,
    "CompiledCodeDamaged": FailureClass.STORAGE,
    "CheckpointDamaged": FailureClass.CHECKPOINT_CORRUPT,
    "Diverged": FailureClass.DIVERGENCE,
    "NonFiniteState": FailureClass.DIVERGENCE,
    "CannotRecompute": FailureClass.GPU_OOM,
    "OOMKilled": FailureClass.HOST_OOM,
    "Hang": FailureClass.HANG,
    "NodeLost": FailureClass.NODE_LOST,
    "Unkillable": FailureClass.NODE_LOST,
    "AgentLost": FailureClass.NODE_LOST,
    "PodDeleted": FailureClass.PREEMPTION,
    "Preempted": FailureClass.PREEMPTION,
    "Evicted": FailureClass.PREEMPTION,
    "PendingTimeout": FailureClass.PENDING_TIMEOUT,
    "BadPod": FailureClass.USER_BUG,
    "Crashed": FailureClass.CRASH,
    "Unreachable": FailureClass.NETWORK,
    "DataError": FailureClass.DATA,
    "BadInput": FailureClass.USER_BUG,
    "PathTaken": FailureClass.USER_BUG,
    "ConfigError": FailureClass.USER_BUG,
    "PluginFailed": FailureClass.USER_BUG,
}

# Exceptions whose name determines the class if their text does not: they say that another rank, a
# store or a server cannot be reached, whatever the text.
_CONNECTION_KINDS = {
    "RendezvousTimeoutError": FailureClass.COLLECTIVE_TIMEOUT,
    "RendezvousError": FailureClass.NETWORK,
    "RendezvousClosedError": FailureClass.NETWORK,
    "RendezvousConnectionError": FailureClass.NETWORK,
    "RendezvousStateError": FailureClass.NETWORK,
    "RendezvousGracefulExitError": FailureClass.NETWORK,
    "QueueEmptyError": FailureClass.COLLECTIVE_TIMEOUT,
    "DistQueueEmptyError": FailureClass.COLLECTIVE_TIMEOUT,
    "DistStoreError": FailureClass.COLLECTIVE_TIMEOUT,
    "DistNetworkError": FailureClass.NETWORK,
    "DistBackendError": FailureClass.NETWORK,
    "DistError": FailureClass.NETWORK,
    # torchrun's own, for a signal that it received.
    "SignalException": FailureClass.PREEMPTION,
    "ConnectionError": FailureClass.NETWORK,
    "TimeoutError": FailureClass.NETWORK,
}

# If several ranks fail together, the cause is sought in this order, and within it by time:
# 1. what the cluster or the kernel states about a node. Errors of other ranks are its consequences;
# 2. a failure of known class;
# 3. an exception that nothing explains, or a deleted pod: a controller deletes the pods of a job in
#    which one has failed;
# 4. what a rank reports if another one is gone: a lost connection, a timeout, or a request to stop.
_STATED = {"OOMKilled", "Unkillable", "NodeLost", "Preempted", "Evicted"}
_ALSO_A_CONSEQUENCE = {"PodDeleted"}
_CAUSES = {"Unreachable"}
_ECHOES = {FailureClass.NETWORK, FailureClass.COLLECTIVE_TIMEOUT, FailureClass.PREEMPTION}

# The first match wins, so the most specific patterns come first.
_TEXTS = [
    (FailureClass.GPU_OOM, DEVICE_TEXTS),
    (
        FailureClass.HOST_OOM,
        r"MemoryError|Cannot allocate memory|Unable to allocate [\d.]+ [KMGT]iB"
        r"|killed by signal: (?:Killed|Bus error)|insufficient shared memory|std::bad_alloc"
        # The same failure, if the loader notices the dead worker before its signal handler does.
        r"|DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly"
        rf"|{NOT_MAPPED}"
        r"|oom-kill|OOMKilled",
    ),
    (
        FailureClass.NODE_LOST,
        r"uncorrectable (?:NVLink error|ECC error)|CUDA_ERROR_ECC_UNCORRECTABLE"
        r"|GPU has fallen off the bus|CUDA error: (?:unknown error|no CUDA-capable device"
        r"|CUDA-capable device\(s\) is/are busy|hardware stack error|system not yet initialized"
        r"|driver shutting down|unspecified launch failure)|over nvlink or a hardware error"
        r"|ncclUnhandledCudaError|unhandled cuda error|Cuda failure (?:\d+ )?'",
    ),
    (
        FailureClass.CHECKPOINT_CORRUPT,
        r"CheckpointDamaged|PytorchStreamReader failed|failed finding central directory"
        r"|Error while deserializing header|SafetensorError|file might be corrupted",
    ),
    (
        FailureClass.DIVERGENCE,
        r"\b[Dd]iverged\b|loss is (?:nan|inf|not finite)|non-finite|FloatingPointError"
        r"|returned nan values|loss scale already at minimum",
    ),
    (
        FailureClass.COLLECTIVE_TIMEOUT,
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send)"
        r"|collective operations? (?:have |has )?(?:failed or )?timed out"
        r"|(?:NCCL|collective) operations? (?:have failed or )?timed out|NCCL timeout (?:in|when)"
        r"|collective timeout or exception|watchdog got stuck for|ProcessGroupNCCL watchdog hang"
        r"|(?:[Ww]ait|barrier) timeout after \d+ms|Timeout waiting for key|Socket Timeout"
        r"|waitForInput: |Timed out after \d+ seconds waiting for clients|Operation timed out!"
        r"|monitoredBarrier|Application timeout caused pair closure|timed out connecting: "
        r"|(?:Connect|Read|Write) timeout \[",
    ),
    (
        FailureClass.STORAGE,
        r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error"
        r"|Stale file handle|StorageError|SlowDown|ServiceUnavailable",
    ),
    # NCCL rejected a call. The same call fails again, but a peer that died may have caused it.
    (FailureClass.UNKNOWN, r"ncclInvalid(?:Usage|Argument)"),
    (
        FailureClass.NETWORK,
        # NCCL, as torch and its own log report it.
        r"nccl(?:Remote|System|Internal)Error|NCCL error: |unhandled system error"
        r"|internal error - please report this issue to the NCCL|remote process exited or there was"
        r"|NCCL communicator (?:was aborted|encountered error|already Invalidated|not initialized)"
        r"|NCCL \w+ failed|NCCL (?:Async|Last) Error|[Ff]ailed to (?:initialize|abort) NCCL"
        r"|Failed to (?:get NCCL unique ID|query NCCL-assigned)|remote error detected from rank"
        r"|watchdog thread terminated with exception|\[Service thread\] (?:Error|Could not|Conn)"
        r"|NET/(?:IB|Socket)[ /\w]*: (?:Got completion|.*(?:error|fatal|failed))"
        r"|ibv_\w+(?:\(\))? failed with"
        r"|socketProgress: |socketFinalizeAccept|Socket recv failed"
        # gloo.
        r"|Gloo connectFullMesh failed|Pair is not connected|Socket (?:unexpectedly )?closed"
        r"|failed to connect, willRetry|caused by a remote worker|Backing context not fully conn"
        # The store and the rendezvous.
        r"|Failed to (?:recv, got|send, sent) 0 bytes|Connection was likely closed"
        r"|(?:send|recv)(?:Bytes|Value|Vector|ValueWithTimeout) failed on"
        r"|Remote peer closed the connection|TCP client failed to connect|connection to the C10d st"
        r"|client socket (?:has (?:timed out|failed to connect)|cannot be initialized)"
        r"|[Ss]erver (?:socket has failed to|could not be initialized)"
        r"|Failed to (?:initialize store|accept (?:socket|client))|Failed to join the rendezvous"
        # errno, as every library reports it.
        r"|[Cc]onnection (?:closed by|reset by) (?:remote )?peer|Connection (?:refused|aborted)"
        r"|Connection timed out|Software caused connection abort|Broken pipe|Host is (?:un|down)"
        r"|Transport endpoint is not connected|Network (?:is (?:unreachable|down)|dropped)"
        r"|No route to host|Address already in use|Cannot assign requested address"
        r"|Name or service not known|Temporary failure in name resolution"
        r"|Max retries exceeded|Read timed out|ConnectionError",
    ),
    (
        FailureClass.DATA,
        r"DataError|ArrowInvalid|index out of range in self|Target -?\d+ is out of bounds"
        r"|UnicodeDecodeError|nll_loss.*(?:Assertion|assert)"
        r"|device-side assert triggered",
    ),
]
_PATTERNS = [(kind, re.compile(pattern)) for kind, pattern in _TEXTS]
CRASHES = frozenset(
    {
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGTRAP,
    }
)
"""Signals of a crash in native code."""


@dataclass(frozen=True, kw_only=True)
class Failure(Cause):
    """Why an attempt failed: the root cause, not its side effects on other ranks.

    traceback: of the rank that failed. "" if there is none, and for steadytrain's own errors, whose
        message is sufficient.
    """

    failure_class: FailureClass
    rank: int = 0
    traceback: str = ""

    @classmethod
    def of(cls, cause: Cause) -> Failure:
        """Return the failure that an event of the ledger records."""
        known = cause_of(cause)
        return cls(**known | {"failure_class": FailureClass(cause.failure_class)})


def cause_of(cause: Cause) -> dict[str, Any]:
    """Return the fields that an event has in common with a failure."""
    return {item.name: getattr(cause, item.name) for item in fields(Cause)}


def classify(
    errors: Sequence[RankError],
    exits: Mapping[int, int],
    logs: Mapping[int, str],
    steps: Mapping[int, int] = MappingProxyType({}),
) -> Failure:
    """Return the failure that ended an attempt.

    Args:
        errors: what the ranks reported, the earliest first.
        exits: exit status by rank (negative: a signal), the earliest failure first.
        logs: the end of each rank's output.
        steps: the last step that each rank is known to have completed.
    """
    suspects = [*map(_reported, errors)]
    suspects += _fallen(exits, logs, steps, reported={error.rank for error in errors})
    if not suspects:
        return _failure(FailureClass.UNKNOWN, 0, "the ranks left no result and no error")
    # The first of equals, so the earliest.
    return min(suspects, key=lambda suspect: suspect.rung).failure


def class_of_text(text: str) -> FailureClass | None:
    """Return the failure class that a text matches, or None if no pattern matches."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(text)), None)


def class_of_error(error: BaseException) -> FailureClass | None:
    """Return the failure class of an exception, or None if nothing determines it."""
    return _class_of(names_of(error), f"{type(error).__name__}: {error}")


def _class_of(names: Sequence[str], text: str) -> FailureClass | None:
    """Return the failure class of an exception.

    Args:
        names: of its class and base classes, the most specific first, and of its causes.
    """
    return (
        next((_KINDS[name] for name in names if name in _KINDS), None)
        or class_of_text(text)
        or next((_CONNECTION_KINDS[name] for name in names if name in _CONNECTION_KINDS), None)
    )


@dataclass(frozen=True)
class _Suspect:
    """A failure that may be the cause of the others. The lowest rung is the cause."""

    failure: Failure
    kind: str = ""

    @property
    def rung(self) -> int:
        failure_class = self.failure.failure_class
        if self.kind in _STATED:
            return 0
        if self.kind in _ALSO_A_CONSEQUENCE or failure_class is FailureClass.UNKNOWN:
            return 2
        return 3 if failure_class in _ECHOES and self.kind not in _CAUSES else 1


def _reported(error: RankError) -> _Suspect:
    name = error.kind.rpartition(".")[2]
    kind = _class_of((name, *error.names), f"{name}: {error.message}") or FailureClass.UNKNOWN
    own = bool(error.remedy)
    failure = Failure(
        failure_class=kind,
        rank=error.rank,
        message=redact(error.message if own else f"{name}: {error.message}"),
        remedy=error.remedy or kind.remedy,
        traceback="" if own else redact(error.traceback),
        failed_step=error.step,
        memory_needed=error.memory_needed,
        still_since=error.still_since,
    )
    return _Suspect(failure, name)


def _fallen(
    exits: Mapping[int, int],
    logs: Mapping[int, str],
    steps: Mapping[int, int],
    *,
    reported: Collection[int],
) -> Iterator[_Suspect]:
    """Yield a failure for each rank that died without a report.

    Skip ranks that were taken down because another one had failed. Such a rank may be the only one
    without a report: it was still waiting for the rank that failed.
    """
    first = True
    for rank, status in exits.items():
        if status == 0:
            continue
        killed_after = status < 0 and not first
        first = False
        if rank not in reported and not killed_after:
            yield _Suspect(_from_exit(rank, status, logs.get(rank, ""), steps.get(rank, 0)))


def _from_exit(rank: int, status: int, log: str, step: int) -> Failure:
    # A shell or container runtime reports signal N as status 128 + N.
    number = -status if status < 0 else status - 128
    if number == signal.SIGTERM:
        return _failure(FailureClass.PREEMPTION, rank, "the rank was asked to stop (SIGTERM)")
    if number == signal.SIGKILL:
        killed = _failure(
            FailureClass.HOST_OOM,
            rank,
            "the rank was killed (SIGKILL), most often by the kernel because memory ran out",
        )
        return replace(killed, unexplained=True)
    output = Output.of(log)
    if status == 1 and output.traceback:
        return _uncaught(rank, output)
    crashed = number in CRASHES
    kind = FailureClass.CRASH if crashed else FailureClass.UNKNOWN
    how = _signal(number) if crashed or status < 0 else f"exit status {status}"
    how += f" after step {step}" if step else ""
    kind_in_text = class_of_text(output.after) or class_of_text(output.rest) or _last_words(output)
    last = output.last_line
    text = f"the rank ended with {how}" + (f": {last}" if last else "")
    return replace(_failure(kind_in_text or kind, rank, text), failed_step=step)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _uncaught(rank: int, output: Output) -> Failure:
    """Classify exit status 1: an uncaught exception, unless a later line shows another cause.

    After its own exception, a rank may also print that it lost the connection to the others.
    """
    name = output.error.partition(":")[0].rpartition(".")[2]
    by_name, later = _class_of((name,), output.traceback), class_of_text(output.after)
    if later and (by_name is None or later not in _ECHOES):
        line = next(line for line in output.after.splitlines() if class_of_text(line) is later)
        return _failure(later, rank, line.strip())
    failure = _failure(by_name or FailureClass.UNKNOWN, rank, output.error)
    return replace(failure, traceback=redact(output.traceback))


def _last_words(output: Output) -> FailureClass | None:
    """Return the retryable class of a traceback at the very end of the output, or None.

    The exception may or may not have been handled.
    """
    kind = class_of_text(output.traceback) if not output.after.strip() else None
    return kind if kind and kind.retryable else None


def _failure(kind: FailureClass, rank: int, message: str) -> Failure:
    return Failure(failure_class=kind, rank=rank, message=redact(message), remedy=kind.remedy)


_OUT_OF_MEMORY: Final = (FailureClass.GPU_OOM, FailureClass.HOST_OOM)
_ANOTHER_RANK: Final = (
    FailureClass.NODE_LOST,
    FailureClass.COLLECTIVE_TIMEOUT,
    FailureClass.NETWORK,
)


class PluginFailed(SteadytrainError):
    """A plugin raised an exception. The traceback shows where."""

    def __init__(self, plugin: str, hook: str, error: BaseException) -> None:
        super().__init__(f"{plugin} failed in {hook}(): {type(error).__name__}: {error}")


@contextlib.contextmanager
def naming(plugin: str, hook: str) -> Iterator[None]:
    """Name the plugin in an exception that it raises, sys.exit included.

    Running out of memory keeps its class, because the run can continue with smaller micro-batches.
    So does what torch raises in a collective if another rank is gone.

    Args:
        plugin: what failed, such as "training component 'ema'".
        hook: the function that is called in the block.

    Raises:
        PluginFailed: the block raised an exception that is not steadytrain's own.
    """
    try:
        yield
    except (SteadytrainError, Stopped):
        raise
    except (Exception, SystemExit) as error:
        kind = class_of_error(error)
        # torch raises a RuntimeError in a collective; a plugin's own connections do not.
        if kind in _OUT_OF_MEMORY or (kind in _ANOTHER_RANK and isinstance(error, RuntimeError)):
            raise
        raise PluginFailed(plugin, hook, error) from error
