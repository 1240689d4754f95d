"""Failure classification: one class per failure, determined from what the ranks left behind."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.out_of_memory import DEVICE_TEXTS
from steadytrain.components.train.attempt import RankError
from steadytrain.components.train.output import Output


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
        return self not in {FailureClass.DATA, FailureClass.USER_BUG, FailureClass.UNKNOWN}

    @property
    def remedy(self) -> str:
        """What the user can do about it."""
        return _REMEDIES[self]


_RESTART = "start the run again; it continues from the newest checkpoint"
_REMEDIES = {
    FailureClass.GPU_OOM: "lower training.micro_batch_size (the global batch stays the same), "
    "set training.gradient_checkpointing, or shorten "
    f"data.sequence_length; then {_RESTART}",
    FailureClass.HOST_OOM: "give the machine or the pod more memory (and more /dev/shm), or use "
    f"fewer workers (compute.nproc_per_node); then {_RESTART}",
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
    FailureClass.UNKNOWN: f"read the end of the logs in the message; {_RESTART}",
}

# If several ranks fail together, failures of these classes are usually side effects of another one.
_ECHOES = {FailureClass.NETWORK, FailureClass.COLLECTIVE_TIMEOUT, FailureClass.PREEMPTION}

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

# The first match wins, so the most specific patterns come first.
_TEXTS = [
    (FailureClass.GPU_OOM, DEVICE_TEXTS),
    (
        FailureClass.HOST_OOM,
        r"MemoryError|Cannot allocate memory|Unable to allocate [\d.]+ [KMGT]iB"
        r"|killed by signal: (?:Killed|Bus error)|insufficient shared memory|std::bad_alloc"
        # The same failure, if the loader notices the dead worker before its signal handler does.
        r"|DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly"
        r"|oom-kill|OOMKilled",
    ),
    (
        FailureClass.NODE_LOST,
        r"uncorrectable (?:NVLink error|ECC error)|CUDA_ERROR_ECC_UNCORRECTABLE"
        r"|GPU has fallen off the bus|CUDA error: (?:unknown error|no CUDA-capable device)",
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
        r"|collective operations? (?:have |has )?(?:failed or )?timed out|DistStoreError"
        r"|wait timeout after \d+ms|Socket Timeout|monitoredBarrier",
    ),
    (
        FailureClass.STORAGE,
        r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error"
        r"|Stale file handle|StorageError|SlowDown|ServiceUnavailable",
    ),
    (
        FailureClass.NETWORK,
        r"[Cc]onnection (?:closed by|reset by) (?:remote )?peer|Connection (?:refused|aborted)"
        r"|ncclRemoteError|ncclSystemError|NCCL error: unhandled system error"
        r"|Name or service not known|Temporary failure in name resolution"
        r"|Max retries exceeded|Read timed out|ConnectionError|Broken pipe|Socket closed"
        r"|Network is unreachable|No route to host|client socket has timed out",
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


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed: the root cause, not its side effects on other ranks.

    message: one line, or the text of steadytrain's own error.
    traceback: of the rank that failed. "" if there is none, and for steadytrain's own errors, whose
        message is sufficient.
    unexplained: the rank was killed from outside, and nothing shows why.
    memory_needed: minimum number of bytes that a rank needs, by a formula; 0 if unknown.
    still_since: time of a hanging rank's last sign of progress; 0 otherwise.
    """

    failure_class: FailureClass
    rank: int
    message: str
    remedy: str
    traceback: str = ""
    step: int = 0
    unexplained: bool = False
    memory_needed: int = 0
    still_since: float = 0.0


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
    roots = [suspect for suspect in suspects if suspect.failure_class not in _ECHOES]
    return (roots or suspects)[0]


def class_of_text(text: str) -> FailureClass | None:
    """Return the failure class that a text matches, or None if no pattern matches."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(text)), None)


def _reported(error: RankError) -> Failure:
    name = error.kind.rpartition(".")[2]
    kind = _KINDS.get(name) or class_of_text(f"{name}: {error.message}") or FailureClass.USER_BUG
    message, _, remedy = error.message.partition("\n  remedy: ")
    return Failure(
        failure_class=kind,
        rank=error.rank,
        message=redact(message if remedy else f"{name}: {message}"),
        remedy=remedy or kind.remedy,
        traceback="" if remedy else redact(error.traceback),
        step=error.step,
        memory_needed=error.memory_needed,
        still_since=error.still_since,
    )


def _fallen(
    exits: Mapping[int, int],
    logs: Mapping[int, str],
    steps: Mapping[int, int],
    *,
    reported: Collection[int],
) -> Iterator[Failure]:
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
            yield _from_exit(rank, status, logs.get(rank, ""), steps.get(rank, 0))


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
    return replace(_failure(kind_in_text or kind, rank, text), step=step)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _uncaught(rank: int, output: Output) -> Failure:
    """Classify exit status 1: an uncaught exception, unless a later line shows another cause.

    After its own exception, a rank may also print that it lost the connection to the others.
    """
    own, later = class_of_text(output.traceback), class_of_text(output.after)
    if later and (own is None or later not in _ECHOES):
        line = next(line for line in output.after.splitlines() if class_of_text(line) is later)
        return _failure(later, rank, line.strip())
    found = _failure(own or FailureClass.USER_BUG, rank, output.error)
    return replace(found, traceback=redact(output.traceback))


def _last_words(output: Output) -> FailureClass | None:
    """Return the retryable class of a traceback at the very end of the output, or None.

    The exception may or may not have been handled.
    """
    kind = class_of_text(output.traceback) if not output.after.strip() else None
    return kind if kind and kind.retryable else None


def _failure(kind: FailureClass, rank: int, message: str) -> Failure:
    return Failure(failure_class=kind, rank=rank, message=redact(message), remedy=kind.remedy)
