"""Every combination that is an error, with the reason, from the table that rejects it."""

from __future__ import annotations

from collections.abc import Iterator

from reference.markdown import code, table

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.compatibility import FEATURES, all_rules
from steadytrain.components.shared.config.strategies import strategy_features


def page() -> str:
    """Optimizers by strategy, all rules, and what their features are."""
    intro = (
        "# Compatibility\n\n"
        "Each of these combinations is an error before anything starts, and no fallback leads to "
        "one. Everything else can be combined. The table is the one that checks a configuration: "
        "`components/shared/config/compatibility.py`, with the specs of optimizers and "
        "strategies, and the rules in the folders of techniques.\n"
    )
    strategies = plugins.names(plugins.STRATEGIES)
    matrix = table(("Optimizer", *map(code, strategies)), _by_strategy(strategies))
    rules = table(
        ("Setting", "Cannot be combined with", "Why"),
        [(code(rule.setting), code(rule.feature), rule.why) for rule in all_rules()],
    )
    features = table(("Feature", "What asks for it"), [(code(k), v) for k, v in FEATURES.items()])
    return "\n".join(
        [
            intro,
            "## Optimizers and strategies\n",
            matrix,
            "## Every rule\n",
            rules,
            "## Features\n\nNames in the second column that are not fields:\n",
            features,
        ]
    )


def _by_strategy(strategies: list[str]) -> Iterator[tuple[str, ...]]:
    ruled_out = {(rule.setting, rule.feature) for rule in all_rules()}
    for name in plugins.names(plugins.OPTIMIZERS):
        setting = f"training.optim {name}"
        yield (
            code(name),
            *(
                "no" if {(setting, item) for item in strategy_features(each)} & ruled_out else "yes"
                for each in strategies
            ),
        )
