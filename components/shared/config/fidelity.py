"""How many tokens a trial's optimizer steps have, and whether rungs in tokens are possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, Final

from steadytrain.components.shared.config.document import shown
from steadytrain.components.shared.config.run import RunConfig
from steadytrain.components.shared.config.tune import TuneConfig
from steadytrain.components.shared.errors import Problem

_BATCH: Final = "training.global_batch_size"
_LENGTH: Final = "data.sequence_length"
_FEWEST: Final = 5
"""Steps between the validations of every trial. Rounding them then changes a rung's tokens by at
most a tenth."""


def tokens_per_step(config: RunConfig, params: Mapping[str, Any]) -> int:
    """Return the tokens of one optimizer step of a trial, with full sequences."""
    batch: int = params.get(_BATCH, config.training.global_batch_size)
    length: int = params.get(_LENGTH, config.data.sequence_length)
    return batch * length


def fidelity_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong with a study's smallest rung and with counting steps and tokens."""
    tune, training = config.tune, config.training
    own = tokens_per_step(config, {})
    for name, most, full in (
        ("steps", tune.budget.steps, training.max_steps),
        ("tokens", tune.budget.tokens, training.max_steps * own),
    ):
        if most is not None and most < full:
            yield Problem(
                f"tune.budget.{name}",
                shown(most),
                f"a trial needs {full:,} {name} to finish, so none could be the best",
                "raise it, or lower training.max_steps",
            )
    if tune.min_steps is not None and 0 < training.max_steps < tune.min_steps:
        yield Problem(
            "tune.min_steps",
            shown(tune.min_steps),
            f"a trial has only training.max_steps = {training.max_steps}",
            "lower it",
        )
    if tune.min_tokens is not None and 0 < training.max_steps * own < tune.min_tokens:
        yield Problem(
            "tune.min_tokens",
            shown(tune.min_tokens),
            f"a trial has only {training.max_steps * own:,} tokens: training.max_steps, of {own:,} "
            "tokens each",
            "lower it",
        )
    if tune.min_tokens is not None and tune.min_steps is not None:
        yield Problem(
            "tune.min_tokens",
            shown(tune.min_tokens),
            "tune.min_steps also sets the smallest rung",
            "remove one of them",
        )
    varies = tune.fidelity == "tokens" and {_BATCH, _LENGTH} & tune.space.keys()
    most = _largest(tune, _BATCH, training.global_batch_size) * _largest(
        tune, _LENGTH, config.data.sequence_length
    )
    if varies and training.eval_steps * own < _FEWEST * most:
        yield Problem(
            "training.eval_steps",
            shown(training.eval_steps),
            f"for tune.fidelity tokens, it is too few: the largest step of the space has {most:,} "
            f"tokens instead of {own:,}, so such a trial would be validated every "
            f"{training.eval_steps * own / most:.2g} steps",
            f"set it to {ceil(_FEWEST * most / own)} or more",
        )


def _largest(tune: TuneConfig, field: str, own: int) -> int:
    """Return the largest value of a field that a trial may have."""
    dimension = tune.space.get(field)
    values = [] if dimension is None else dimension.choices or [dimension.high]
    # Other values are problems of their own.
    return max([own, *(int(value) for value in values if isinstance(value, int | float))])
