"""What fits into the memory of a device, learned by one run and used by the next."""

from __future__ import annotations

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.records import DataRecord, Record


class Learned(Record):
    """The largest micro-batch that trained, and what it took: activation checkpointing, shards."""

    micro_batch_size: int
    gradient_checkpointing: bool
    strategy: str = ""
    offload: str = "none"


def memory_fingerprint(config: RunConfig, data: DataRecord, *, device: str, world_size: int) -> str:
    """Digest of all that decides what fits: model, length, device, precision, strategy."""
    training = config.training
    return value_digest(
        {
            "model": config.model.model_dump(mode="json"),
            "task": data.task,
            "sequence_length": data.sequence_length,
            "device": device,
            "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32",
            "optimizer": training.optim,
            "strategy": config.compute.strategy,
            "offload": config.compute.offload,
            "world_size": world_size,
            "gradient_checkpointing": training.gradient_checkpointing,
        }
    )
