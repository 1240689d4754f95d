"""How a run recovers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from steadytrain.components.shared.effects import Effect
from steadytrain.components.shared.section import Seconds, Section


class RecoveryConfig(Section):
    """How a run recovers from failures, and which earlier results it reuses."""

    reuse_ttl_seconds: Seconds = Field(
        3600,
        ge=0,
        description="Maximum age in seconds of another run's step outputs that this run may reuse.",
    )
    checkpoints: str | None = Field(
        None,
        min_length=1,
        description="Folder or s3:// address for the run's checkpoints. None means the run's "
        "folder.",
    )
    seconds_between_failures: Seconds = Field(
        14_400,
        gt=0,
        description="Expected mean time between failures in seconds, used until the run has "
        "had failures of its own.",
    )
    stop_grace_seconds: Seconds = Field(
        20,
        gt=0,
        description="Seconds that ranks have to exit after SIGTERM before they get SIGKILL.",
    )
    max_failures_per_class: int = Field(
        3,
        ge=1,
        description="Failures of one class in a row without a new checkpoint that stop the run.",
    )
    max_preemptions: int | None = Field(
        None, ge=1, description="The same limit for preemptions. None means max_failures_per_class."
    )
    backoff_seconds: Seconds = Field(
        2,
        ge=0,
        description="Seconds to wait before the first retry. The wait doubles with each retry "
        "in a row.",
    )
    backoff_max_seconds: Seconds = Field(
        60, ge=0, description="Maximum wait before a retry, in seconds."
    )
    jitter: bool = Field(
        True, description="Shorten each wait by a random share of up to a quarter."
    )
    breaker_failures: int = Field(
        3,
        ge=1,
        description="Failures in a row without a new checkpoint, of any class except preemption, "
        "that open the circuit breaker.",
    )
    breaker_reset_seconds: Seconds = Field(
        120, ge=0, description="Seconds that the circuit breaker stays open before one last try."
    )
    resubmit: int = Field(
        3,
        ge=0,
        description="How many times in a row without a new checkpoint the exit handler submits "
        "the pipeline again after a step was lost with its pod. It never does so after a "
        "termination. 0 means never.",
    )
    server_wait_seconds: Annotated[Seconds, Effect.WAITING] = Field(
        300,
        ge=0,
        description="How long a step waits for a tracking server that is down, such as one that "
        "restarts, or that answers HTTP 408, 429, 500, 502, 503 or 504. After that the step fails "
        "with the server's message, and the exit handler submits the pipeline again, as often as "
        "`resubmit` says.",
    )
    on_demand_at_last: bool = Field(
        False,
        description="Run the last attempt after preemptions or lost nodes without "
        "compute.pods.spot.",
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        description="Fewest nodes to continue with when others are unavailable. The global batch "
        "stays the same, and the next restart after a checkpoint tries all nodes again. None means "
        "all nodes are required.",
    )
    hang_timeout_seconds: Seconds = Field(
        600,
        gt=0,
        description="Seconds without progress after which a rank counts as hung and all ranks "
        "restart. Must be longer than the longest batch or save. Collectives wait longer than "
        "this and start_timeout_seconds, so that a hang is found first.",
    )
    start_timeout_seconds: Seconds = Field(
        1800, gt=0, description="The same limit before a rank's first step and after its last one."
    )
    lease_seconds: Seconds = Field(
        60,
        gt=0,
        description="Seconds without a sign of life after which a supervisor or an agent counts "
        "as dead and may be replaced.",
    )
    spike_threshold: Annotated[float, Effect.DIVERGENCE] = Field(
        6.0,
        ge=0,
        description="Deviations above the median loss at which a step counts as diverged, if its "
        "loss also gives back half of the improvement so far. 0 means only non-finite losses "
        "count.",
    )
    spike_window: Annotated[int, Effect.DIVERGENCE] = Field(
        128,
        ge=4,
        description="Number of most recent steps used for that median. Detection starts once "
        "half of them exist.",
    )
