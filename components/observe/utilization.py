"""Model FLOPs utilization of an attempt."""

from __future__ import annotations

from steadytrain.components.sizing.hardware import known_gpu
from steadytrain.components.train.recovery.history import AttemptHistory

_PER_PARAMETER, _WITH_FROZEN_WEIGHTS = 6.0, 4.0
"""FLOPs for each parameter and token, forward and backward. Frozen weights need no gradients."""


def flops_utilization(
    attempt: AttemptHistory, tokens_per_second: float, *, adapters: bool
) -> float | None:
    """Return the share of the GPUs' peak that a speed needs; None if the peak is unknown.

    Args:
        tokens_per_second: of all ranks together.
        adapters: whether the model's own weights are frozen.
    """
    ready = attempt.ready
    gpu = known_gpu(ready.device) if ready else None
    if ready is None or gpu is None:
        return None
    peak = gpu.fp32_tflops if ready.precision == "fp32" else gpu.half_tflops
    flops = (_WITH_FROZEN_WEIGHTS if adapters else _PER_PARAMETER) * ready.parameters
    return flops * tokens_per_second / (attempt.started.world_size * peak * 1e12)
