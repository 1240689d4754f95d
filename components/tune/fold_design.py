"""The design of a cross-validation: which configurations train on which folds.

A cross-validation is a study whose trials are known from the start: every configuration on every
fold, fold by fold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from steadytrain.components.shared.config import AblationConfig, RunConfig, from_mapping
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tune.design import without_search
from steadytrain.components.tune.history import Params, Trial
from steadytrain.components.tune.space import Fits

AS_IT_IS: Final = "as it is"
"""What the configuration without further changes is called."""
_FOLD: Final = "cross_validation.fold"


def is_cross_validation(config: RunConfig) -> bool:
    """Return whether a study's configuration is that of a cross-validation."""
    return not config.tune.space and not config.ablation.changes


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
    trials = len(configurations(config)) * chosen.folds
    return config.model_copy(
        update={"tune": without_search(config.tune, trials), "ablation": AblationConfig()}
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


class FoldDesign:
    """Suggests the trials of a cross-validation in their order."""

    def __init__(self, config: RunConfig) -> None:
        self._folds, self._configurations = config.cross_validation.folds, configurations(config)
        self._names = list(self._configurations)

    def suggest(self, number: int, given: Params, fits: Fits) -> Params | None:  # noqa: ARG002
        fold, index = divmod(number, len(self._names))
        if fold == self._folds:
            return None
        return {**self._configurations[self._names[index]], _FOLD: fold}

    def note(self, trial: Trial) -> None:
        """Do nothing: the design does not depend on results."""

    def configuration(self, trial: Trial) -> str:
        """Return the name of the configuration that a trial trains."""
        return self._names[trial.number % len(self._names)]

    def fold(self, trial: Trial) -> int:
        """Return the fold that a trial holds out."""
        return trial.number // len(self._names)
