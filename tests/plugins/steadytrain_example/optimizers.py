"""The Lion optimizer, with one 32-bit value for each weight: half of what AdamW keeps."""

from steadytrain.components.shared.config.optimizers import OptimizerSpec, StateTensor


def build(groups, training, *, scaled):
    # Validation and the planner import this module, so torch is imported only here.
    from steadytrain_example import lion

    return lion.Lion(groups, training.learning_rate, (training.adam_beta1, training.adam_beta2))


LION = OptimizerSpec(
    build=build,
    tensors=(StateTensor("momentum"),),
    adam_settings=("adam_beta1", "adam_beta2"),
)
