"""What is no error in a configuration, but probably not what its user wants."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.toolchain import REMEDY, missing_tools


def here(config: RunConfig) -> Iterator[str]:
    """Yield what this machine lacks for the kernels that the run would compile here."""
    missing = missing_tools()
    if config.training.torch_compile and config.compute.launcher != "trainjob" and missing:
        yield (
            f"training.torch_compile: this machine lacks {', '.join(missing)}; if the run trains "
            f"here, it continues without compiling. To compile, {REMEDY}"
        )


def anywhere(config: RunConfig) -> Iterator[str]:
    """Yield which settings cannot act, as far as the configuration alone shows it."""
    from steadytrain.components.sizing.without_effect import without_effect

    training = config.training
    if training.max_steps > 0:
        yield from without_effect(training, None, training.max_steps)
    most, needed = config.evaluation.max_examples, config.gate.min_units
    if most is not None and most < needed:
        yield (
            f"evaluation.max_examples = {most}: fewer than gate.min_units = {needed}, so the gate "
            "can never decide, and promotes nothing; raise evaluation.max_examples, or lower "
            "gate.min_units"
        )


def on_cluster(config: RunConfig) -> Iterator[str]:
    """Yield what the pods of the steps reserve too little for."""
    if config.compute.launcher == "process" and "train" not in config.pipeline.resources:
        yield (
            "compute.launcher = process: training runs in the pod of the train step, which "
            "reserves only what a supervisor needs; set pipeline.resources, such as "
            "train: {cpu: '4', memory: 16Gi}"
        )
