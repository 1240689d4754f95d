"""The design of an ablation: which variants train on which seeds, and what is compared.

An ablation is a study whose trials are known from the start: every variant on every seed, seed by
seed, so that more seeds only add trials at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.config import RunConfig, TuneConfig
from steadytrain.components.shared.config.ablation import DESIGNS, AblationConfig
from steadytrain.components.shared.config.ablation import Design as DesignName
from steadytrain.components.shared.config.changes import merged
from steadytrain.components.tune.history import Params, Trial
from steadytrain.components.tune.space import Fits

Variant = tuple[str, ...]
"""The changes that a variant of the configuration has."""

SEED: Final = "training.seed"


@dataclass(frozen=True)
class Comparison:
    """Two variants that differ in one change."""

    design: DesignName
    change: str
    changed: Variant
    unchanged: Variant


def is_ablation(config: RunConfig) -> bool:
    """Return whether a study's configuration is that of an ablation."""
    return bool(config.ablation.changes) and not config.tune.space


def as_ablation(config: RunConfig) -> RunConfig:
    """Return the configuration of the study that an ablation is."""
    trials = len(variants(config.ablation)) * config.ablation.seeds
    return config.model_copy(update={"tune": without_search(config.tune, trials)})


def without_search(tune: TuneConfig, trials: int) -> TuneConfig:
    """Return the settings of a study that trains each of its trials to the end."""
    return TuneConfig(
        objective=tune.objective,
        pruner="none",
        budget=tune.budget.model_copy(update={"trials": trials}),
        max_failed_share=tune.max_failed_share,
        log=tune.log,
        seeds=0,
    )


def variants(ablation: AblationConfig) -> list[Variant]:
    """Return the variants that train, each once."""
    found = dict[Variant, None]()
    for item in comparisons(ablation):
        found |= {item.changed: None, item.unchanged: None}
    return list(found)


def comparisons(ablation: AblationConfig) -> Iterator[Comparison]:
    """Yield what is compared."""
    # By name: the order in the file must not change which trial is which.
    names = tuple(sorted(ablation.changes))
    for design in DESIGNS:
        for name in names if design in ablation.designs else ():
            if design == "leave_one_out":
                rest = tuple(other for other in names if other != name)
                yield Comparison(design, name, names, rest)
            else:
                yield Comparison(design, name, (name,), ())


class Design:
    """Suggests the trials of an ablation in their order."""

    def __init__(self, config: RunConfig) -> None:
        self._ablation, self._seed = config.ablation, config.training.seed
        self.variants = variants(config.ablation)

    def suggest(self, number: int, given: Params, fits: Fits) -> Params:  # noqa: ARG002
        place, index = divmod(number, len(self.variants))
        return {**merged(self._ablation, self.variants[index]), SEED: self._seed + place}

    def note(self, trial: Trial) -> None:
        """Do nothing: the design does not depend on results."""

    def variant(self, trial: Trial) -> Variant:
        """Return the variant that a trial trains."""
        return self.variants[trial.number % len(self.variants)]


def variant_name(variant: Variant, changes: int) -> str:
    """Return a variant in words.

    Args:
        changes: number of the ablation's changes.
    """
    if len(variant) == changes > 1:
        return "all changes"
    return " + ".join(variant) or "no change"
