"""Check a search space, and an ablation's changes, against the schema before any trial starts.

Rungs in tokens need trials whose steps have a known number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Final

from steadytrain.components.shared.config.compatibility import OPTIM
from steadytrain.components.shared.config.document import assign, shown
from steadytrain.components.shared.config.fields import Field, describe, effect_of
from steadytrain.components.shared.config.optimizers import unread_settings
from steadytrain.components.shared.config.run import RunConfig
from steadytrain.components.shared.config.schedules import schedule_spec
from steadytrain.components.shared.config.tune import AblationConfig, Dimension, TuneConfig
from steadytrain.components.shared.errors import BadInput, ConfigError, Problem

Build = Callable[[Mapping[str, Any]], RunConfig]
"""Returns the configuration for plain data, or raises ConfigError."""

Found = tuple[str, str, str]
"""The part of the dimension, what is wrong, and the fix."""

_SHOWN_VALUES: Final = 10
"""Rejected values of a field that are listed one by one."""


def space_problems(config: RunConfig, build: Build, *, doubtful: bool) -> Iterator[Problem]:
    """Yield what is wrong with the `tune` section of a configuration, all of it.

    Args:
        doubtful: whether other sections have problems too, and stand at their defaults here. Then
            this leaves out what depends on them.
    """
    tune = config.tune
    yield from _settings(config) if not doubtful else ()
    for field, dimension in tune.space.items():
        problems = list(_dimension_problems(config, field, dimension))
        if not problems and not doubtful and (problem := _no_effect(config, field)):
            problems = [problem]
        for where, message, remedy in problems:
            yield Problem(_name(field, where), _shown(dimension), message, remedy)
        if not problems and not doubtful:
            yield from _value_problems(config, field, build)


def _dimension_problems(config: RunConfig, field: str, dimension: Dimension) -> Iterator[Found]:
    """Yield what is wrong with a field of the space, whatever the other sections say."""
    if problem := field_problem(config, field):
        yield problem
        return
    checks = (
        _when_problem(config.tune.space, field),
        _kind_problem(field, dimension),
        _grid_problem(config, field),
    )
    yield from filter(None, checks)


def changed(config: RunConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other values as plain data, without what only studies use.

    Settings of an optimizer that these values replace are left out if the new one has none.

    Raises:
        BadInput: there is no such field.
    """
    content = config.model_dump(
        mode="json",
        exclude={
            **dict.fromkeys(("tune", "ablation", "automl"), True),
            "cross_validation": {"compare", "confidence"},
        },
    )
    for field, value in values.items():
        assign(content, field, value)
    for name in unread_settings(values.get(OPTIM)):
        if f"training.{name}" not in values:
            del content["training"][name]
    return content


def _no_effect(config: RunConfig, field: str) -> Found | None:
    """Return why some or all trials ignore a field that varies; None if all read it."""
    space = config.tune.space
    kind = "model.adapter.kind"
    of_adapters = field.startswith("model.adapter.") and field != kind
    if of_adapters and kind not in space and not config.model.adapter.freezes:
        return (
            "",
            f"it has no effect: {kind} is none",
            f"set {kind} to lora, or remove the field from the space",
        )
    if choices := _unread_choices(space, field):
        unread, read = choices
        return (
            "",
            f"{OPTIM} {unread[0]} does not read it",
            f"add when: {{{OPTIM}: {shown(read)}}}" if read else "remove the field from the space",
        )
    shape = "training.lr_scheduler_type"
    if field == "training.warmup_steps" and shape not in space:
        kind = config.training.lr_scheduler_type
        if not schedule_spec(kind).warms_up:
            return (
                "",
                f"it has no effect: {shape} {kind} has no warm-up",
                f"choose another {shape}, or remove the field from the space",
            )
    return None


def _unread_choices(
    space: Mapping[str, Dimension], field: str
) -> tuple[Sequence[str], Sequence[str]] | None:
    """Return the optimizers of a space that do not read a field that it varies, and those that do.

    None if each one reads it, or the field varies only under other conditions.
    """
    dimension, optim = space[field], space.get(OPTIM)
    if optim is None or optim.choices is None or (dimension.when and OPTIM not in dimension.when):
        return None
    name = field.removeprefix("training.")
    unread = [choice for choice in optim.choices if name in unread_settings(choice)]
    met = [item for item in unread if not dimension.when or dimension.allows(OPTIM, item)]
    return (met, [item for item in optim.choices if item not in unread]) if met else None


def is_whole(field: str, dimension: Dimension) -> bool:
    """Return whether a range consists of whole numbers, as its field's type says.

    Without a type, as in model.config, its own ends and step say it.
    """
    result = _typed(field)
    if result is not None:
        return "float" not in result.kind.split(" | ")
    ends = (dimension.low, dimension.high, dimension.step)
    return all(end is None or isinstance(end, int) for end in ends)


def _settings(config: RunConfig) -> Iterator[Problem]:
    tune = config.tune
    if tune.more_objectives and tune.pruner != "none":
        yield Problem(
            "tune.pruner",
            shown(tune.pruner),
            "with several objectives, no trial is the best at a rung",
            "set it to none, or leave out tune.more_objectives",
        )
    if tune.sampler == "cmaes" and (tune.more_objectives or len(tune.ranges) < 2):
        yield Problem(
            "tune.sampler",
            shown(tune.sampler),
            "it needs one objective and at least two fields with a range and without `when`",
            "use tpe",
        )
    names = [item.metric for item in tune.objectives]
    if len(set(names)) < len(names):
        yield Problem(
            "tune.more_objectives", shown(names[1:]), "a metric occurs twice", "remove one of them"
        )
    yield from fidelity_problems(config)


def field_problem(config: RunConfig, field: str) -> Found | None:
    """Return why a field cannot vary between trials; None if it can."""
    if "." not in field and field not in RunConfig.model_fields:
        return "", "no such field", "give its full name, such as training.learning_rate"
    if reason := effect_of(field).fixed:
        return "", f"it cannot be tuned: {reason}", "remove it from the space"
    try:
        result = _typed(field)
        changed(config, {field: None})
    except BadInput as error:
        return "", "no such field", error.remedy
    if result is not None and not result.kind:
        return (
            "",
            "it is a section, not a field",
            f"name a field, such as {field}.{result.inner[0]}",
        )
    return None


def _when_problem(space: Mapping[str, Dimension], field: str) -> Found | None:
    for other, wanted in space[field].when.items():
        where = f".when.{other}"
        if other not in space or other == field:
            return (
                where,
                "the condition needs another field of the space",
                f"add {other} to tune.space, or remove the condition",
            )
        choices = space[other].choices
        values = wanted if isinstance(wanted, list) else [wanted]
        if choices is None:
            return where, f"{other} has a range, not choices", "give it choices, or remove `when`"
        for value in values:
            if value not in choices:
                return (
                    where,
                    f"{value!r} is not one of its choices, so the field would never vary",
                    f"one of {', '.join(map(repr, choices))}",
                )
        if _depends(space, other, field, set()):
            return where, f"{other} depends on {field} in turn", "remove one of the conditions"
    return None


def _depends(space: Mapping[str, Dimension], field: str, on: str, seen: set[str]) -> bool:
    """Return whether the conditions of a field lead to another one."""
    if field in seen or field not in space:
        return False
    return any(
        other == on or _depends(space, other, on, {*seen, field}) for other in space[field].when
    )


def _kind_problem(field: str, dimension: Dimension) -> Found | None:
    result = _typed(field)
    if dimension.choices is not None or result is None:
        return None
    kinds = result.kind.split(" | ")
    if not {"int", "float"} & set(kinds):
        return "", f"a range needs a number, and the field is {result.kind}", "give choices"
    ends = (dimension.low, dimension.high, dimension.step)
    if "float" not in kinds and not all(end is None or end == int(end) for end in ends):
        return "", "the field takes whole numbers only", "give whole numbers"
    return None


def _grid_problem(config: RunConfig, field: str) -> Found | None:
    dimension = config.tune.space[field]
    countable = dimension.choices is not None or dimension.step is not None
    if config.tune.sampler != "grid" or countable:
        return None
    if is_whole(field, dimension) and not dimension.log:
        return None
    return "", "a grid has no end without a step", "give a step or choices, or another tune.sampler"


def _value_problems(config: RunConfig, field: str, build: Build) -> Iterator[Problem]:
    """Build the configuration with the ends of a range or with each choice."""
    dimension, rejected = config.tune.space[field], 0
    digests = set[str]()
    for where, value in samples(field, dimension):
        try:
            variant = build(changed(config, {**_conditions(config, field), field: value}))
        except ConfigError as error:
            rejected += 1
            if rejected <= _SHOWN_VALUES:
                yield _rejected(field, where, value, error.problems[0])
        else:
            if len(digests) < 2:
                digests.add(variant.digest())
    if rejected > _SHOWN_VALUES:
        yield Problem(
            _name(field, ".choices"),
            f"{rejected:,} values",
            f"the configuration rejects {rejected - _SHOWN_VALUES:,} further values",
            "remove them too",
        )
    if not rejected and len(digests) < 2:
        yield Problem(
            _name(field, ""), _shown(dimension), "it has no effect", "remove it from the space"
        )


def _rejected(field: str, where: str, value: Any, problem: Problem) -> Problem:
    about = "" if problem.field == field else f" ({problem.field})"
    return Problem(
        _name(field, where),
        shown(value),
        f"the configuration rejects this value{about}: {problem.message}",
        problem.remedy,
    )


def _conditions(config: RunConfig, field: str) -> dict[str, Any]:
    """Return values of other fields for which a field varies."""
    values: dict[str, Any] = {}
    for other, wanted in config.tune.space[field].when.items():
        values |= _conditions(config, other)
        values[other] = wanted[0] if isinstance(wanted, list) else wanted
    return values


def samples(field: str, dimension: Dimension) -> Iterator[tuple[str, Any]]:
    """Yield the choices of a field, or the ends of its range, each with its place in the field."""
    if dimension.choices is not None:
        yield from ((f".choices.{index}", item) for index, item in enumerate(dimension.choices))
        return
    assert dimension.low is not None
    assert dimension.high is not None
    kind = int if is_whole(field, dimension) else float
    yield ".low", kind(dimension.low)
    yield ".high", kind(dimension.high)


def _typed(field: str) -> Field | None:
    """Return a field's description; None for a part of a field that holds any mapping.

    Raises:
        BadInput: there is no such field.
    """
    try:
        return describe(field)
    except BadInput:
        parts = field.split(".")
        for end in range(1, len(parts)):
            try:
                result = describe(".".join(parts[:end]))
            except BadInput:
                break
            if result.kind.startswith("dict"):
                return None
        raise


def _name(field: str, where: str) -> str:
    return f"tune.space.{field}{where}"


def _shown(dimension: Dimension) -> str:
    return shown(dimension.model_dump(exclude_defaults=True))


def change_problems(config: RunConfig, build: Build) -> Iterator[Problem]:
    """Yield what is wrong with the `ablation` section of an otherwise valid configuration."""
    unusable = False
    for name, values in config.ablation.changes.items():
        problems = list(_problems_of_one(config, f"ablation.changes.{name}", values, build))
        unusable = unusable or bool(problems)
        yield from problems
    if not unusable and "leave_one_out" in config.ablation.designs:
        yield from _combined_problems(config, build)


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
        if problem := field_problem(config, field):
            _, message, remedy = problem
            wrong = True
            yield Problem(f"{where}.{field}", shown(value), message, remedy)
    if wrong:
        return
    try:
        variant = build(changed(config, values))
    except ConfigError as error:
        yield _rejected_change(where, values, error)
        return
    if variant.digest() == config.digest():
        yield Problem(
            where,
            shown(dict(values)),
            "it has no effect: the configuration has these values",
            "change a value, or remove it",
        )


def _combined_problems(config: RunConfig, build: Build) -> Iterator[Problem]:
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
        yield _rejected_change("ablation.changes", values, error)


def _rejected_change(where: str, values: Mapping[str, Any], error: ConfigError) -> Problem:
    problem = error.problems[0]
    message = f"the configuration rejects these values ({problem.field}): {problem.message}"
    return Problem(where, shown(dict(values)), message, problem.remedy)


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
    base_tokens = tokens_per_step(config, {})
    for name, most, full in (
        ("steps", tune.budget.steps, training.max_steps),
        ("tokens", tune.budget.tokens, training.max_steps * base_tokens),
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
    if tune.min_tokens is not None and 0 < training.max_steps * base_tokens < tune.min_tokens:
        yield Problem(
            "tune.min_tokens",
            shown(tune.min_tokens),
            f"a trial has only {training.max_steps * base_tokens:,} tokens: training.max_steps, "
            f"of {base_tokens:,} tokens each",
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
    if varies and training.eval_steps * base_tokens < _FEWEST * most:
        yield Problem(
            "training.eval_steps",
            shown(training.eval_steps),
            f"for tune.fidelity tokens, it is too few: the largest step of the space has {most:,} "
            f"tokens instead of {base_tokens:,}, so such a trial would be validated every "
            f"{training.eval_steps * base_tokens / most:.2g} steps",
            f"set it to {ceil(_FEWEST * most / base_tokens)} or more",
        )


def _largest(tune: TuneConfig, field: str, own: int) -> int:
    """Return the largest value of a field that a trial may have."""
    dimension = tune.space.get(field)
    values = [] if dimension is None else dimension.choices or [dimension.high]
    # Other values are problems of their own.
    return max([own, *(int(value) for value in values if isinstance(value, int | float))])
