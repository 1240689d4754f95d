"""What a search would do, for `--dry-run`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.automl.design import (
    first_configurations,
    most_configurations,
    planned,
)
from steadytrain.components.automl.portfolio import (
    MONOTONE,
    Configuration,
    families,
    portfolio,
)
from steadytrain.components.automl.time_limit import UNIT_SECONDS
from steadytrain.components.preprocess.folds import preview_folds
from steadytrain.components.preprocess.inspection import first_rows
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import (
    IMAGES,
    NETWORKS,
    SERIES,
    TABLES,
    TEXTS,
)
from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.shared.quantities import duration, money
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tune.designs import with_fold
from steadytrain.components.tune.study import study_name

_ROWS: Final = 100
"""Records that show how many columns there are."""
_COLUMNS: Final = 20
"""What `Family.seconds` of time series, which have no columns to learn from, counts with."""


@dataclass(frozen=True)
class Plan:
    """What a search would do.

    known: the portfolio; what the budget leaves of it begins in this order.
    skipped: why configurations are left out, by name.
    units: that start.
    records: of the training side; None if the data are not read here.
    seconds: of wall time for all units, roughly, without `automl.budget.hours`; None without
        records.
    training_seconds: of all units one after another, which the cost counts; None without records.
    usd: for these; None if the price is unknown.
    warnings: about the records.
    """

    known: Sequence[Configuration]
    skipped: Mapping[str, str]
    units: int
    records: int | None
    seconds: float | None = None
    training_seconds: float | None = None
    usd: float | None = None
    warnings: Sequence[str] = ()


def plan(config: RunConfig) -> Plan:
    """Return what a search would do.

    Args:
        config: of the study (`as_automl`).

    Raises:
        DataError: the data cannot be divided into folds.
    """
    known, unfit = planned(first_configurations(config))
    _, skipped = portfolio(config)
    skipped |= unfit
    budget, folds = config.tune.budget, config.cross_validation.splits
    most = most_configurations(config, len(known))
    units = int(min(budget.trials // folds, most)) * folds
    try:
        preview = preview_folds(with_fold(config, 0))
    except DataError:
        raise
    except (BadInput, StorageError):
        return Plan(known, skipped, units, None)
    records, families_by_name = preview.records, families()
    costs = [families_by_name[item.family].seconds for item in known]
    # A configuration after the portfolio is expected to cost as much as the portfolio's mean.
    each = [
        costs[index] if index < len(costs) else sum(costs) / len(costs)
        for index in range(units // folds)
    ]
    columns = _columns(config)
    # Each of several labels is learned alone.
    values = records * _values(config, columns) * _epochs(config, records)
    learning = sum(each) * folds * values * max(1, preview.labels) / 1e6
    training = learning + units * UNIT_SECONDS
    price = config.compute.price_per_hour
    usd = None if price is None else training / 3600 * price
    seconds = training / budget.parallel
    warnings = [*preview.warnings, *_unknown(config, columns)]
    return Plan(known, skipped, units, records, seconds, training, usd, warnings)


def _columns(config: RunConfig) -> Collection[str]:
    """Return the columns of the first records of a table; none of other data."""
    if config.data.task not in TABLES:
        return ()
    with closing(first_rows(config.data, _ROWS)) as rows:
        return {name for _, _, row in rows if not isinstance(row, Defect) for name in row}


def _unknown(config: RunConfig, columns: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each column that the configuration names and a table does not have."""
    named = {
        "data.categories": config.data.categories,
        "data.allow_leaks": config.data.allow_leaks,
        f"model.config.{MONOTONE}": config.model.config.get(MONOTONE, {}),
    }
    for field, names in named.items():
        for name in names if columns else ():
            if name not in columns:
                yield f"{field} names {name!r}, and none of the first records has that column"


def _values(config: RunConfig, columns: Collection[str]) -> int:
    """Return the values of a record that are learned from."""
    data = config.data
    if data.task in SERIES:
        return _COLUMNS
    if data.task in NETWORKS:
        pixels = 0 if data.task in TEXTS else data.images.size**2 * data.images.channels
        tokens = 0 if data.task in IMAGES else data.sequence_length
        return pixels + tokens
    return max(1, len({*columns} - {*config.data.targets}))


def _epochs(config: RunConfig, records: int) -> float:
    """Return how often a network reads each record; 1 for other models."""
    if config.data.task not in NETWORKS:
        return 1.0
    training = config.training
    if training.max_steps > 0:
        return training.max_steps * training.global_batch_size / records
    return training.num_train_epochs


def lines(config: RunConfig, found: Plan) -> list[str]:
    """Return the plan as lines of text."""
    budget, chosen = config.tune.budget, config.cross_validation
    begun = found.units // chosen.splits
    searched = max(0, begun - len(found.known))
    times = "" if chosen.repeats == 1 else f", {chosen.repeats} times"
    hours, price = config.automl.budget.hours, config.compute.price_per_hour
    target = f", target {', '.join(config.data.targets)}" if config.data.targets else ""
    return [
        f"study       {study_name(config)}",
        f"task        {config.data.task}{target}",
        f"records     {'not read here' if found.records is None else f'{found.records:,}'}, "
        f"in {chosen.folds} folds{times}",
        f"units       {found.units:,}: configurations x folds, {budget.parallel} at a time",
        f"searched    {searched} configurations after the portfolio",
        f"time        {_about(found.seconds, duration)}"
        + (
            ""
            if hours is None
            else f", of which automl.budget.hours leaves {duration(hours * 3600)}"
        ),
        f"training    {_about(found.training_seconds, duration)} for all units together",
        f"cost        {_about(found.usd, money)}"
        + ("" if price is not None else ": compute.price_per_hour is not set"),
        *(f"portfolio   {item.name}" for item in found.known[:begun]),
        *(f"not begun   {item.name}: the budget ends before it" for item in found.known[begun:]),
        *(f"left out    {name}: {reason}" for name, reason in found.skipped.items()),
        *(f"warning     {text}" for text in found.warnings),
    ]


def _about(value: float | None, show: Callable[[float], str]) -> str:
    return "unknown" if value is None else f"about {show(value)}"


def as_plain(config: RunConfig, found: Plan) -> dict[str, Any]:
    """Return the plan for programs."""
    return {
        "study": study_name(config),
        "task": config.data.task,
        "configurations": [item.as_plain() for item in found.known],
        "skipped": dict(found.skipped),
        "folds": config.cross_validation.folds,
        "repeats": config.cross_validation.repeats,
        "units": found.units,
        "parallel": config.tune.budget.parallel,
        "records": found.records,
        "expected_seconds": found.seconds,
        "expected_training_seconds": found.training_seconds,
        "expected_usd": found.usd,
        "warnings": list(found.warnings),
    }
