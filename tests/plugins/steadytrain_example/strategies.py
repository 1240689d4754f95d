"""A strategy that gathers weights once per micro-batch. This module does not import torch."""

from steadytrain.components.shared.config.strategies import StrategySpec


def build(config, accelerator, module, make_optimizer, *, offload):
    from steadytrain_example import sharded

    bf16 = config.training.bf16
    return sharded.KeepsWeights(accelerator, module, make_optimizer, bf16=bf16)


FSDP_KEEP = StrategySpec(
    title="FSDP that keeps weights",
    build=build,
    shards=frozenset({"optimizer", "gradients", "weights"}),
    unsupported={"training.fp16": "its loss scaler needs complete gradients"},
    fallback="fsdp",
)
