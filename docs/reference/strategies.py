"""Every strategy with what it shards and supports, from the specs."""

from __future__ import annotations

from reference.markdown import code, table

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.strategies import StrategySpec, strategy_spec


def page() -> str:
    """A table of all strategies."""
    specs = {name: strategy_spec(name) for name in plugins.names(plugins.STRATEGIES)}
    intro = (
        "# Strategies\n\n"
        "`compute.strategy` takes these names, and `auto`. A run that is out of device memory "
        "changes to the fallback. [Compatibility](compatibility.md) lists what each does not "
        "support.\n"
    )
    heads = ("Name", "Sharded", "`compute.offload`", "Most ranks", "Fallback")
    rows = [(code(name), *_row(spec)) for name, spec in specs.items()]
    return "\n".join([intro, table(heads, rows)])


def _row(spec: StrategySpec) -> tuple[str, ...]:
    return (
        ", ".join(sorted(spec.shards)) or "nothing",
        ", ".join(map(code, ("none", *spec.offloads))),
        "any" if spec.max_ranks is None else str(spec.max_ranks),
        code(spec.fallback) if spec.fallback else "none",
    )
