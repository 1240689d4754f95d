"""DeepSpeed's configuration of a strategy, as plain data."""

from __future__ import annotations

import math
from typing import Any


def zero_config(*, stage: int, limit: float, bf16: bool, offload: str) -> dict[str, Any]:
    """What `deepspeed.initialize` takes.

    The loop counts micro-batches and scales losses itself, so that DeepSpeed knows of one of each.

    Args:
        stage: of ZeRO. limit: largest norm of the gradients; infinite: they are not clipped.
        offload: none, optimizer, or all: weights too.
    """
    host = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": stage}
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
