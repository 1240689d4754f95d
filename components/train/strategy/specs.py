"""The product's own strategies: replicated, PyTorch's FSDP2, and DeepSpeed's ZeRO."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Final

from steadytrain.components.shared.config.strategies import Offload, StrategySpec

_NEEDS_ALL_OF_IT: Final = {
    "training.torch_compile": "a compiled graph needs complete weights",
    "training.monitor.noise_scale": "ranks that shard never have a micro-batch's whole gradient",
    "training.fp16": "its loss scaler needs complete gradients",
    "model.adapter.kind qlora": "ranks cannot shard quantized weights",
    **dict.fromkeys(
        ("model.adapter.frozen_head 8bit", "model.adapter.frozen_head 4bit"),
        "ranks cannot shard a quantized head",
    ),
    "model.adapter.frozen_embeddings host": "ranks cannot shard embeddings in host memory",
}
"""What needs the complete state on each rank, and why. Optimizers say it in their own specs."""


def _replicated(
    config: Any,
    accelerator: Any,
    module: Any,
    make_optimizer: Any,
    *,
    offload: Offload,
) -> Any:
    from steadytrain.components.train.strategy.replicated import Replicated

    del offload
    compression = config.training.gradient_compression
    return Replicated(accelerator, module, make_optimizer, compression)


def _fully_sharded(
    config: Any,
    accelerator: Any,
    module: Any,
    make_optimizer: Any,
    *,
    offload: Offload,
) -> Any:
    from steadytrain.components.train.strategy.fully_sharded import FullySharded

    bf16 = config.training.bf16
    return FullySharded(accelerator, module, make_optimizer, bf16=bf16, offload=offload == "all")


def _zero(
    config: Any,
    accelerator: Any,
    module: Any,
    make_optimizer: Any,
    *,
    offload: Offload,
    stage: int,
) -> Any:
    from steadytrain.components.train.offloaded import folder_of
    from steadytrain.components.train.strategy.zero import Zero

    return Zero(
        accelerator,
        module,
        make_optimizer,
        stage=stage,
        bf16=config.training.bf16,
        offload=offload,
        folder=folder_of(config, int(os.environ.get("GROUP_RANK", "0"))),
    )


SINGLE: Final = StrategySpec(title="single", build=_replicated, max_ranks=1, accelerate="NO")
DDP: Final = StrategySpec(title="DDP", build=_replicated, fallback="fsdp", accelerate="MULTI_GPU")
FSDP: Final = StrategySpec(
    title="FSDP",
    build=_fully_sharded,
    shards=frozenset({"optimizer", "gradients", "weights"}),
    # It moves weights, gradients and optimizer state together or not at all.
    offloads=("all",),
    unsupported=_NEEDS_ALL_OF_IT,
    accelerate="FSDP",
)
_ZERO_LACKS: Final = {
    **_NEEDS_ALL_OF_IT,
    "training.param_groups frozen": "DeepSpeed keeps no 32-bit copy of frozen weights, so a "
    "checkpoint would lose bits of them",
}
ZERO_1: Final = StrategySpec(
    title="DeepSpeed ZeRO-1",
    build=partial(_zero, stage=1),
    shards=frozenset({"optimizer"}),
    offloads=("optimizer",),
    library="deepspeed",
    accelerate="DEEPSPEED",
    unsupported=_ZERO_LACKS,
    # FSDP shards everything that ZeRO-3 does, but this user chose DeepSpeed.
    fallback="zero2",
)
ZERO_2: Final = StrategySpec(
    title="DeepSpeed ZeRO-2",
    build=partial(_zero, stage=2),
    shards=frozenset({"optimizer", "gradients"}),
    offloads=("optimizer",),
    library="deepspeed",
    accelerate="DEEPSPEED",
    unsupported=_ZERO_LACKS,
    fallback="zero3",
)
ZERO_3: Final = StrategySpec(
    title="DeepSpeed ZeRO-3",
    build=partial(_zero, stage=3),
    shards=frozenset({"optimizer", "gradients", "weights"}),
    offloads=("optimizer", "disk", "all"),
    library="deepspeed",
    accelerate="DEEPSPEED",
    unsupported=_ZERO_LACKS,
)
