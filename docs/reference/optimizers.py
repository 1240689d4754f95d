"""Every optimizer with its memory, from the specs."""

from __future__ import annotations

from reference.markdown import code, table

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.optimizers import OptimizerSpec, optimizer_spec


def page() -> str:
    """A table of all optimizers."""
    specs = {name: optimizer_spec(name) for name in plugins.names(plugins.OPTIMIZERS)}
    intro = (
        "# Optimizers\n\n"
        "`training.optim` takes these names. State is in bytes for each trained weight: in the "
        "matrices of the layers, and elsewhere (embeddings, head, biases, norms). Factored state "
        "is 4 bytes for each row and column of a matrix, and for each weight of a vector. "
        "[Training techniques](../techniques/index.md) says when to use which, and "
        "[Compatibility](compatibility.md) what each does not support.\n"
    )
    heads = ("Name", "State in matrices", "State elsewhere")
    rows = [(code(name), _bytes(spec, 1.0), _bytes(spec, 0.0)) for name, spec in specs.items()]
    return "\n".join([intro, table(heads, rows)])


def _bytes(spec: OptimizerSpec, matrices: float) -> str:
    if spec.factored:
        return "factored"
    return f"{spec.device_bytes(matrices) + spec.host_bytes(matrices):.3g}"
