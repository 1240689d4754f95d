"""Every optimizer with its memory and what it does not support, from the specs."""

from __future__ import annotations

from reference.markdown import code, table

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.optimizers import OptimizerSpec, optimizer_spec


def page() -> str:
    """A table of all optimizers, and one of everything that each does not support."""
    specs = {name: optimizer_spec(name) for name in plugins.names(plugins.OPTIMIZERS)}
    intro = (
        "# Optimizers\n\n"
        "`training.optim` takes these names. State is in bytes for each trained weight: in the "
        "matrices of the layers, and elsewhere (embeddings, head, biases, norms). [Training "
        "techniques](../guides/techniques.md) says when to use which.\n"
    )
    heads = ("Name", "State in matrices", "State elsewhere")
    rows = [(code(name), _bytes(spec, 1.0), _bytes(spec, 0.0)) for name, spec in specs.items()]
    reasons = [
        (code(name), code(feature), why)
        for name, spec in specs.items()
        for feature, why in spec.unsupported.items()
    ]
    limits = (
        "## What they do not support\n\n"
        "Such a combination is an error before anything starts, and no fallback leads to it. "
        "`sharding` stands for every [strategy](strategies.md) that shards the optimizer's state, "
        "`cpu` for a CPU and for offloading, and `schedule` for a learning rate that changes after "
        "warm-up.\n"
    )
    limited = table(("Optimizer", "Feature", "Why"), reasons)
    return "\n".join([intro, table(heads, rows), limits, limited])


def _bytes(spec: OptimizerSpec, matrices: float) -> str:
    return f"{spec.device_bytes(matrices) + spec.host_bytes(matrices):.3g}"
