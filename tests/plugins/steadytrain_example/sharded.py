"""The strategy itself."""

from torch.distributed.fsdp import FSDPModule

from steadytrain.components.train.strategy.fully_sharded import FullySharded


class KeepsWeights(FullySharded):
    """Gathers each layer's weights once per micro-batch instead of twice."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_reshard_after_forward(False)
