"""DeepSpeed's configuration of a strategy, as plain data."""

from __future__ import annotations

import math
from typing import Any, Final

LARGEST_BUCKET: Final = 50_000_000
"""Values that ranks exchange at a time. DeepSpeed's own default is ten times that, and allocated
whatever the model's size: 4 GB of a GPU."""


def zero_config(
    *, stage: int, limit: float, bf16: bool, offload: str, parameters: int, trained: int
) -> dict[str, Any]:
    """What `deepspeed.initialize` takes.

    The loop counts micro-batches and scales losses itself, so that DeepSpeed knows of one of each.

    Args:
        stage: of ZeRO. limit: largest norm of the gradients; infinite: they are not clipped.
        offload: none, optimizer, or all: weights too.
        parameters: of the model. trained: of these, those that are trained.
    """
    host = {"device": "cpu", "pin_memory": True}
    bucket, weights = bucket_values(trained), bucket_values(parameters)
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": weights,
        # Else a billion of other ranks' weights stay, which a small GPU has no room for.
        "stage3_max_live_parameters": weights,
        "stage3_max_reuse_distance": weights,
    }
    if offload != "none":
        zero["offload_optimizer"] = host
    if offload == "all":
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if math.isinf(limit) else limit,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
        # The loop's own AdamW, on GPUs and in the host's memory alike.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def bucket_values(parameters: int) -> int:
    """Of a bucket, for so many parameters."""
    return min(LARGEST_BUCKET, parameters)
