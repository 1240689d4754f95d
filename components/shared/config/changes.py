"""Check the changes of an ablation or a cross-validation before any trial starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from steadytrain.components.shared.config.plain import shown
from steadytrain.components.shared.config.run import RunConfig
from steadytrain.components.shared.config.space import Build, changed, field_problem
from steadytrain.components.shared.config.studies import AblationConfig
from steadytrain.components.shared.errors import ConfigError, Problem


def change_problems(config: RunConfig, build: Build) -> Iterator[Problem]:
    """Yield what is wrong with the `ablation` section of an otherwise valid configuration."""
    unusable = False
    for name, values in config.ablation.changes.items():
        found = list(_problems_of_one(config, f"ablation.changes.{name}", values, build))
        unusable = unusable or bool(found)
        yield from found
    if not unusable and "leave_one_out" in config.ablation.designs:
        yield from _problems_together(config, build)


def comparison_problems(config: RunConfig, build: Build) -> Iterator[Problem]:
    """Yield what is wrong with the configurations that a cross-validation compares."""
    for name, values in config.cross_validation.compare.items():
        yield from _problems_of_one(config, f"cross_validation.compare.{name}", values, build)


def merged(ablation: AblationConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that some changes set together."""
    return {field: value for name in names for field, value in ablation.changes[name].items()}


def _problems_of_one(
    config: RunConfig, where: str, values: Mapping[str, Any], build: Build
) -> Iterator[Problem]:
    wrong = False
    for field, value in values.items():
        if found := field_problem(config, field):
            _, message, remedy = found
            wrong = True
            yield Problem(f"{where}.{field}", shown(value), message, remedy)
    if wrong:
        return
    try:
        variant = build(changed(config, values))
    except ConfigError as error:
        yield _rejected(where, values, error)
        return
    if variant.digest() == config.digest():
        yield Problem(
            where,
            shown(dict(values)),
            "it has no effect: the configuration has these values",
            "change a value, or remove it",
        )


def _problems_together(config: RunConfig, build: Build) -> Iterator[Problem]:
    """Yield why the changes cannot be combined, as leave_one_out does."""
    changes, set_by = config.ablation.changes, dict[str, str]()
    for name, values in changes.items():
        for field in values:
            if field in set_by:
                yield Problem(
                    f"ablation.changes.{name}.{field}",
                    shown(values[field]),
                    f"{set_by[field]} sets it too, and leave_one_out applies all changes together",
                    "set it in one of them, or set ablation.designs to [one_at_a_time]",
                )
                return
            set_by[field] = name
    values = merged(config.ablation, tuple(changes))
    try:
        build(changed(config, values))
    except ConfigError as error:
        yield _rejected("ablation.changes", values, error)


def _rejected(where: str, values: Mapping[str, Any], error: ConfigError) -> Problem:
    problem = error.problems[0]
    message = f"the configuration rejects these values ({problem.field}): {problem.message}"
    return Problem(where, shown(dict(values)), message, problem.remedy)
