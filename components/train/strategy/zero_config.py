"""DeepSpeed's configuration for a ZeRO stage, as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steadytrain.components.memory.states import LARGEST_GROUP, bucket_values, swap_buffers
from steadytrain.components.shared.config.strategies import DISK


def zero_config(
    *,
    stage: int,
    bf16: bool,
    offload: str,
    parameters: int,
    trained: int,
    tensors: int = 0,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`.

    The loop counts micro-batches and scales losses itself, so DeepSpeed is configured with a
    micro-batch size and accumulation of 1. It also says at each step where to clip.

    Args:
        stage: stage of ZeRO.
        offload: as in `compute.offload`.
        parameters: number of parameters of the model.
        trained: number of parameters that are trained.
        tensors: how many tensors the optimizer keeps for each of them. Only for files.
        folder: for the files of offload "disk".
    """
    host = {"device": "cpu", "pin_memory": True}
    bucket, weights = bucket_values(trained), bucket_values(parameters)
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        # DeepSpeed requires an even number here.
        "allgather_bucket_size": bucket + bucket % 2,
        "stage3_prefetch_bucket_size": weights,
        # The default keeps a billion of other ranks' weights, too many for a small GPU.
        "stage3_max_live_parameters": weights,
        "stage3_max_reuse_distance": weights,
    }
    if offload == DISK:
        zero["sub_group_size"] = LARGEST_GROUP
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": str(folder),
            "buffer_count": swap_buffers(tensors),
        }
    elif offload != "none":
        zero["offload_optimizer"] = host
    if offload == "all":
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
        # The loop's own AdamW, on GPUs and in host memory.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
