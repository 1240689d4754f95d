"""Every strategy with what it shards, supports and rules out, from the specs."""

from __future__ import annotations

from reference.markdown import code, table

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.strategies import StrategySpec, strategy_spec


def page() -> str:
    """A table of all strategies, and a table of reasons for each that rules something out."""
    specs = {name: strategy_spec(name) for name in plugins.names(plugins.STRATEGIES)}
    intro = (
        "# Strategies\n\n"
        "`compute.strategy` takes these names, and `auto`. A run that is out of device memory "
        "changes to the fallback.\n"
    )
    heads = ("Name", "Sharded", "`compute.offload`", "Most ranks", "Fallback")
    rows = [(code(name), *_row(spec)) for name, spec in specs.items()]
    reasons = [
        f"## What {name} does not support\n\n"
        + table(("Setting", "Why"), [(code(item), why) for item, why in spec.unsupported.items()])
        for name, spec in specs.items()
        if spec.unsupported
    ]
    return "\n".join([intro, table(heads, rows), *reasons])


def _row(spec: StrategySpec) -> tuple[str, ...]:
    return (
        ", ".join(sorted(spec.shards)) or "nothing",
        ", ".join(map(code, ("none", *spec.offloads))),
        "any" if spec.max_ranks is None else str(spec.max_ranks),
        code(spec.fallback) if spec.fallback else "none",
    )
