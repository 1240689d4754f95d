"""Studies whose trials are known from the start: ablations and cross-validations.

An ablation trains every variant on every seed, seed by seed, so that more seeds only add trials at
the end. A cross-validation trains every configuration on every fold, fold by fold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig, TuneConfig, from_mapping
from steadytrain.components.shared.config.space import changed, merged
from steadytrain.components.shared.config.tune import DESIGNS, AblationConfig, AutoMLConfig
from steadytrain.components.shared.config.tune import Design as DesignName
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tune.history import Params, Trial
from steadytrain.components.tune.samplers import Suggester
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
    compared = dict[Variant, None]()
    for item in comparisons(ablation):
        compared |= {item.changed: None, item.unchanged: None}
    return list(compared)


def comparisons(ablation: AblationConfig) -> Iterator[Comparison]:
    """Yield what is compared."""
    # By name: the order in the file must not change which trial is which.
    names = tuple(sorted(ablation.changes))
    for design in DESIGNS:
        for name in names if design in ablation.designs else ():
            if design == "leave_one_out":
                others = tuple(other for other in names if other != name)
                yield Comparison(design, name, names, others)
            else:
                yield Comparison(design, name, (name,), ())


class Design(Suggester):
    """Suggests the trials of an ablation in their order."""

    def __init__(self, config: RunConfig) -> None:
        self._ablation, self._seed = config.ablation, config.training.seed
        self.variants = variants(config.ablation)

    def suggest(self, number: int, fixed: Params, fits: Fits) -> Params:  # noqa: ARG002
        repeat, index = divmod(number, len(self.variants))
        return {**merged(self._ablation, self.variants[index]), SEED: self._seed + repeat}

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


AS_IT_IS: Final = "as it is"
"""What the configuration without further changes is called."""
_FOLD: Final = "cross_validation.fold"


def is_cross_validation(config: RunConfig) -> bool:
    """Return whether the trials of a study's configuration hold out folds."""
    return not config.tune.space and not config.ablation.changes


def is_automl(config: RunConfig) -> bool:
    """Return whether a study's configuration is that of `steadytrain automl`."""
    return is_cross_validation(config) and config.automl.quality is not None


def check_folds(config: RunConfig) -> None:
    """Check that a configuration asks for a cross-validation, and for no other study.

    Raises:
        BadInput: it varies fields.
    """
    if not is_cross_validation(config):
        field = "tune.space" if config.tune.space else "ablation.changes"
        raise BadInput(
            f"{field} is set, and a cross-validation varies nothing",
            remedy="leave it out, or name configurations in cross_validation.compare",
        )


def as_cross_validation(config: RunConfig) -> RunConfig:
    """Return the configuration of the study that a cross-validation is.

    Raises:
        BadInput: it holds out a fold itself, or the name of a configuration is taken.
    """
    chosen = config.cross_validation
    if chosen.fold is not None:
        raise BadInput(
            f"{_FOLD} = {chosen.fold}: a cross-validation holds out every fold in turn",
            remedy="leave it out",
        )
    if AS_IT_IS in chosen.compare:
        raise BadInput(
            f"cross_validation.compare.{AS_IT_IS}: the configuration without changes has this name",
            remedy="give it another name",
        )
    trials = len(configurations(config)) * chosen.splits
    return config.model_copy(
        update={
            "tune": without_search(config.tune, trials),
            "ablation": AblationConfig(),
            "automl": AutoMLConfig(),
        }
    )


def configurations(config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
    """Return the configurations by name, each with the fields that it sets."""
    compare = config.cross_validation.compare
    # By name: the order in the file must not change which trial is which.
    return {AS_IT_IS: {}} | {name: compare[name] for name in sorted(compare)}


def with_fold(config: RunConfig, fold: int) -> RunConfig:
    """Return the configuration of a run that holds out a fold.

    Raises:
        ConfigError: such a run is not possible.
    """
    return from_mapping(changed(config, {_FOLD: fold}))


class FoldDesign(Suggester):
    """Suggests the trials of a cross-validation in their order."""

    def __init__(self, config: RunConfig) -> None:
        self._folds, self._configurations = config.cross_validation.splits, configurations(config)
        self._names = list(self._configurations)

    def suggest(self, number: int, fixed: Params, fits: Fits) -> Params | None:  # noqa: ARG002
        fold, index = divmod(number, len(self._names))
        if fold == self._folds:
            return None
        return {**self._configurations[self._names[index]], _FOLD: fold}

    def configuration(self, trial: Trial) -> str:
        """Return the name of the configuration that a trial trains."""
        return self._names[trial.number % len(self._names)]

    def fold(self, trial: Trial) -> int:
        """Return the fold that a trial holds out."""
        return trial.number // len(self._names)
