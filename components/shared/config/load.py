"""Load a RunConfig from a preset's name, a file or YAML text, plus overrides.

It collects every problem before it reports any. Each has a field, a value and a fix.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from steadytrain.components.shared.config.document import (
    assign,
    damage,
    find_unfit,
    parse,
    read,
    shortened,
    shown,
    stated_fields,
)
from steadytrain.components.shared.config.fields import describe
from steadytrain.components.shared.config.run import SCHEMA_VERSION, RunConfig
from steadytrain.components.shared.config.secrets import (
    PLACEHOLDER,
    find_secrets,
    names_a_secret,
    redact,
)
from steadytrain.components.shared.config.space import (
    change_problems,
    comparison_problems,
    space_problems,
)
from steadytrain.components.shared.effects import types_of
from steadytrain.components.shared.errors import BadInput, ConfigError, Problem

_TYPE: Final = re.compile(r"function-|constrained-|\w+\[")
"""Begins what Pydantic puts into a location for the type that it tried: literal['uniform']."""
_QUOTES: Final = ("'", '"', "|", ">")
"""Characters that begin quoted or block text in YAML."""
_STUDIES: Final = ("tune.", "ablation.", "cross_validation.compare")
_log = logging.getLogger(__name__)
_PRESETS: Final = resources.files("steadytrain.components.shared.config") / "presets"


def preset_names() -> list[str]:
    """Return the names of the built-in configurations."""
    return sorted(item.name.removesuffix(".yaml") for item in _PRESETS.iterdir() if item.is_file())


Override = str | tuple[str, Any]


def load(source: str | Path, overrides: Iterable[Override] | Mapping[str, Any] = ()) -> RunConfig:
    """Read a configuration.

    Args:
        source: a preset's name, a file's path, or the YAML text itself.
        overrides: "a.b=value" strings (value in YAML), pairs of a field and its value, or a mapping
            from field to value. The log names what a string takes back: an earlier string of the
            same field, or the rest of a section that it replaces.

    Raises:
        BadInput: if there is no preset or file with that name, or the text is not YAML.
        ConfigError: with every problem in the configuration.
    """
    content, typed = read_mapping(source), set[str]()
    for item in overrides.items() if isinstance(overrides, Mapping) else overrides:
        ((field, value),) = override_items([item])
        if field in typed:
            _log.warning("%s is set more than once; the last value counts", redact(field))
        before = stated_fields(content)
        assign(content, field, value)
        if isinstance(item, str):
            typed.add(field)
            gone = sorted(before - stated_fields(content) - {field})
            if value and gone:
                _log.warning(
                    "%s is replaced as a whole, and no longer has %s; to keep the rest, set one "
                    "field at a time",
                    redact(field),
                    redact(", ".join(gone)),
                )
    return from_mapping(content)


def read_mapping(source: str | Path) -> dict[str, Any]:
    """Return what a preset, file or text states, without overrides, defaults or checks.

    Raises:
        BadInput: if there is no preset or file with that name, or the text is not YAML.
    """
    return _parse(_read(source), source)


def from_mapping(content: Mapping[str, Any]) -> RunConfig:
    """Return a RunConfig for plain data.

    Raises:
        ConfigError: with every problem.
    """
    if unfit := list(find_unfit(dict(content))):
        # The other checks need values that can be printed and stored.
        raise ConfigError(unfit)
    problems = [*_version_problems(content), *find_secrets(dict(content))]
    hidden = {problem.field for problem in problems}
    try:
        config = RunConfig.model_validate(content)
    except ValidationError as error:
        problems += [item for item in _all_problems(content, error) if item.field not in hidden]
    else:
        problems += _study_problems(config, doubtful=False)
    if problems:
        raise ConfigError(problems)
    return config


def validated(content: Mapping[str, Any]) -> RunConfig:
    """Return a RunConfig for plain data that were checked before, but for a few fields.

    This is far faster than `from_mapping`, which also looks for what only people write.

    Raises:
        ConfigError: with every problem.
    """
    try:
        return RunConfig.model_validate(content)
    except ValidationError:
        return from_mapping(content)


def _study_problems(config: RunConfig, *, doubtful: bool) -> Iterator[Problem]:
    """Yield what is wrong with the sections of studies.

    Args:
        doubtful: as for `space_problems`.
    """
    limits = {"tune": config.tune.budget.usd, "automl": config.automl.budget.usd}
    for section, usd in limits.items():
        if usd is not None and not config.compute.price_per_hour:
            yield Problem(
                f"{section}.budget.usd",
                shown(usd),
                "the price of an hour is unknown"
                if config.compute.price_per_hour is None
                else "an hour costs nothing, so it limits nothing",
                "set compute.price_per_hour; `steadytrain plan` shows the prices that it knows",
            )
    if config.tune.space:
        yield from space_problems(config, validated, doubtful=doubtful)
    if doubtful:
        return
    if config.ablation.changes:
        yield from change_problems(config, from_mapping)
    if config.cross_validation.compare:
        yield from comparison_problems(config, from_mapping)


def _all_problems(content: Mapping[str, Any], error: ValidationError) -> list[Problem]:
    """Return the problems of single fields, then the problems of field combinations.

    Combinations are checked with the invalid fields reset to their defaults.
    """
    remaining, result = copy.deepcopy(dict(content)), dict[str, Problem]()
    while True:
        items = error.errors(include_url=False)
        before, mistyped = len(result), set[str]()
        for item in items:
            problem, other_type = _explain(item), str(item["type"]).endswith("_type")
            # If a field may have several types, report on the one that the value has.
            if problem.field not in result or (problem.field in mistyped and not other_type):
                result[problem.field] = problem
                (mistyped.add if other_type else mistyped.discard)(problem.field)
            context = item.get("ctx", {}).get("field")
            _take_out(remaining, context.split(".") if context else item["loc"])
        _stand_in(remaining)
        if len(result) == before:
            return list(result.values())
        try:
            config = RunConfig.model_validate(remaining)
        except ValidationError as next_error:
            error = next_error
        else:
            doubtful = not all(field.startswith(_STUDIES) for field in result)
            problems = _study_problems(config, doubtful=doubtful)
            return [*result.values(), *(item for item in problems if item.field not in result)]


def _take_out(content: dict[str, Any], location: Sequence[int | str]) -> None:
    """Remove the innermost part of a location that a mapping holds."""
    holder: Any = content
    path = []
    for part in location:
        if not isinstance(holder, dict) or part not in holder:
            break
        path.append((holder, part))
        holder = holder[part]
    # Do not remove a complete section, because the problem may be a field in it.
    # A problem of the whole configuration has no location.
    if path and (len(path) == len(location) or not isinstance(holder, dict)):
        # Without its kind, nothing reads the other fields of a section.
        whole = path[-1][1] == "kind" and len(path) > 1
        parent, part = path[-2 if whole else -1]
        del parent[part]


def _stand_in(content: dict[str, Any]) -> None:
    """Fill in required fields. Without them, pydantic does not check field combinations."""
    content.setdefault("name", "any")
    data = content.setdefault("data", {})
    if not data.get("parts"):
        data.setdefault("source", ["any"])
    content.setdefault("model", {"base": "any"})


def _read(source: str | Path) -> str:
    text = str(source)
    if isinstance(source, str) and "\n" in source:
        return source
    if text in preset_names():
        return (_PRESETS / f"{text}.yaml").read_text()
    return read(
        Path(text),
        f"configuration {shown(redact(text))}, which is not the name of a preset",
        f"give one of the presets {', '.join(preset_names())}, or the path of a YAML file",
    )


def _parse(text: str, source: str | Path) -> dict[str, Any]:
    what = "the configuration" if text is source else f"configuration {source}"
    content = parse(text, what)
    if not isinstance(content, dict):
        raise BadInput(
            f"{what} is a {type(content).__name__}, not a mapping of sections",
            remedy="start from a preset: `steadytrain schema` lists every field",
        )
    if harm := damage(text, content):
        raise BadInput(
            f"{what} {harm}",
            remedy="restore the file, or remove its first line to use it as it is; to change a "
            "run's settings, continue it with `steadytrain run FILE --set FIELD=VALUE`",
        )
    return content


def override_items(
    overrides: Iterable[Override] | Mapping[str, Any],
) -> Iterable[tuple[str, Any]]:
    """Yield the field and the value of each override.

    Raises:
        BadInput: if one is not of the form section.field=value, or has no value.
    """
    for item in overrides.items() if isinstance(overrides, Mapping) else overrides:
        if isinstance(item, tuple):
            yield item
            continue
        field, separator, value = item.partition("=")
        if not separator or not field:
            raise BadInput(
                f"override {shown(redact(item))} is not of the form section.field=value",
                remedy="for example training.learning_rate=3e-4",
            )
        yield field.strip(), _value(field.strip(), value)


def _value(field: str, text: str) -> Any:
    """Return the value of an override. For text fields, return the text exactly as written."""
    if not text.strip():
        raise BadInput(
            f"override {shown(redact(f'{field}='))} has no value",
            remedy="write null for a field's empty value; if the value is a variable, set it",
        )
    value = parse(text, f"the value of override {shown(redact(field))}")
    types = _types_of(field)
    if value is None or str not in types:
        return value
    # YAML reads `hub:` as a mapping, joins several lines, and drops everything after ` #`.
    read = text.lstrip().startswith(_QUOTES) if isinstance(value, str) else type(value) in types
    return value if read else text.strip()


def _types_of(field: str) -> set[Any]:
    """Return what a field may hold, such as {str, list}; nothing if there is no such field."""
    section: Any = RunConfig
    types = set[Any]()
    for part in field.split("."):
        fields = getattr(section, "model_fields", {})
        if part not in fields:
            return set()
        section = fields[part].annotation
        kinds = [*types_of(section)]
        for mark in fields[part].metadata:
            # What a validator takes and makes into the field's own type.
            wide = getattr(mark, "json_schema_input_type", PydanticUndefined)
            kinds += types_of(wide) if wide is not PydanticUndefined else ()
        types = {get_origin(kind) or kind for kind in kinds}
    return types


def _version_problems(content: Mapping[str, Any]) -> Iterable[Problem]:
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        yield Problem(
            field="schema_version",
            value=shown(version),
            message=f"this version of steadytrain reads schema version {SCHEMA_VERSION}",
            remedy="install a newer steadytrain"
            if newer
            else f"rewrite it for version {SCHEMA_VERSION} (`steadytrain schema`)",
        )


def _explain(item: Mapping[str, Any]) -> Problem:
    location = [part for part in item["loc"] if not _TYPE.match(str(part))]
    field = redact(".".join(map(str, location))) or "configuration"
    kind, message = str(item["type"]), str(item["msg"]).removeprefix("Value error, ")
    if isinstance(given := item.get("input"), str):
        # A validator may repeat what it was given, however long that is.
        message = message.replace(given, shortened(given))
    named = any(names_a_secret(str(part)) for part in location)
    # Redact before shortening, so that no part of a secret remains.
    value = PLACEHOLDER if named else shortened(redact(repr(item.get("input"))))
    if kind == "at_odds":
        context = item["ctx"]
        value = shortened(redact(context["value"]))
        return Problem(context["field"], value, context["message"], context["remedy"])
    if kind == "missing":
        return Problem(field, "(missing)", "is required", f"set {field}")
    if kind == "extra_forbidden":
        return Problem(field, value, "no such field", _suggest(location))
    if kind == "string_type" and isinstance(item.get("input"), int | float):
        return Problem(field, value, message, f"put it in quotes: {field.split('.')[-1]}: '...'")
    name = _explained(list(takewhile(lambda part: isinstance(part, str), location)))
    remedy = f"change {field}; `steadytrain validate --explain {name}` shows its values"
    return Problem(field, value, message, redact(remedy))


def _explained(location: Sequence[int | str]) -> str:
    """Return the name of the innermost field or section that has an explanation."""
    for end in range(len(location), 1, -1):
        with contextlib.suppress(BadInput):
            return describe(".".join(map(str, location[:end]))).name
    return str(location[0]) if location else ""


def _suggest(location: list[Any]) -> str:
    section: type[BaseModel] = RunConfig
    for part in location[:-1]:
        annotation = section.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        section = annotation
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}"
