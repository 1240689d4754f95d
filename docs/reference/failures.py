"""Every failure class with its fix, from the taxonomy."""

from __future__ import annotations

from typing import Final

from reference.markdown import code, table

from steadytrain.components.train.failures import FailureClass

MEANINGS: Final = {
    FailureClass.GPU_OOM: "The GPU ran out of memory. On a CPU, an allocation failed.",
    FailureClass.HOST_OOM: "The machine or the pod ran out of memory, or the kernel killed a rank.",
    FailureClass.PREEMPTION: "The pod was preempted, evicted or deleted, or a rank got SIGTERM.",
    FailureClass.NODE_LOST: "The node or its GPU is gone.",
    FailureClass.HANG: "A rank made no progress within `recovery.hang_timeout_seconds`.",
    FailureClass.COLLECTIVE_TIMEOUT: "Ranks waited too long for each other.",
    FailureClass.NETWORK: "A connection failed.",
    FailureClass.STORAGE: "A read or a write failed, retries included.",
    FailureClass.CHECKPOINT_CORRUPT: "A checkpoint does not match its digests.",
    FailureClass.DIVERGENCE: "The loss is not finite, or it spiked.",
    FailureClass.DATA: "A record cannot be used.",
    FailureClass.USER_BUG: "The configuration or a component raised an error, or an exception that "
    "nothing explains ended the run a second time.",
    FailureClass.PENDING_TIMEOUT: "A pod got no node, quota or image in time.",
    FailureClass.CRASH: "Native code crashed, for example with SIGSEGV.",
    FailureClass.UNKNOWN: "An exception that nothing explains, or no result and no error. It is "
    "retried once.",
}


def page() -> str:
    """One table."""
    intro = (
        "# Failure classes\n\n"
        "steadytrain puts every failed attempt into one class. `steadytrain explain RUN` and "
        "the report name it. [Recovery](../guides/recovery.md) says what the supervisor does "
        "about each class; the last column says what you can do when the run has stopped.\n"
    )
    rows = [
        (code(kind.value), MEANINGS[kind], "yes" if kind.retryable else "no", kind.remedy)
        for kind in FailureClass
    ]
    return "\n".join([intro, table(("Class", "Meaning", "Retried", "Fix"), rows)])
