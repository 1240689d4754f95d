"""From a preset's name, a file or YAML text, and overrides, to a RunConfig.

Every problem is found before any is reported, each with field, value and remedy.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from steadytrain.components.shared.config.run import SCHEMA_VERSION, RunConfig
from steadytrain.components.shared.config.secrets import find_secrets, redact
from steadytrain.components.shared.errors import BadInput, ConfigError, Problem


def preset_names() -> list[str]:
    """Names of the configurations that come with the product."""
    folder = resources.files("steadytrain.pipelines") / "presets"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.is_file())


def load(source: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Reads a configuration.

    Args:
        source: a preset's name, a file's path, or the YAML text itself.
        overrides: "a.b=value" texts (value in YAML), or a mapping of the same.

    Raises:
        BadInput: nothing of that name, or text that is not YAML.
        ConfigError: with every problem of the configuration.
    """
    content = _parse(_read(source))
    for field, value in _override_items(overrides):
        _assign(content, field, value)
    return from_mapping(content)


def from_mapping(content: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from plain data.

    Raises:
        ConfigError: with every problem.
    """
    problems = [*_version_problems(content), *find_secrets(dict(content))]
    hidden = {problem.field for problem in problems}
    try:
        config = RunConfig.model_validate(content)
    except ValidationError as error:
        problems += [item for item in _all_problems(content, error) if item.field not in hidden]
    if problems:
        raise ConfigError(problems)
    return config


def _all_problems(content: Mapping[str, Any], error: ValidationError) -> list[Problem]:
    """Problems of single fields, and then, with those fields as by default, of several."""
    rest, found = copy.deepcopy(dict(content)), dict[str, Problem]()
    while True:
        items = error.errors(include_url=False)
        before = len(found)
        for item in items:
            problem = _explain(item)
            found.setdefault(problem.field, problem)
            told = item.get("ctx", {}).get("field")
            _take_out(rest, told.split(".") if told else item["loc"])
        _stand_in(rest)
        if len(found) == before:
            return list(found.values())
        try:
            RunConfig.model_validate(rest)
        except ValidationError as next_error:
            error = next_error
        else:
            return list(found.values())


def _take_out(content: dict[str, Any], location: Sequence[int | str]) -> None:
    """Removes the innermost of a location's parts that a mapping holds."""
    holder: Any = content
    path = []
    for part in location:
        if not isinstance(holder, dict) or part not in holder:
            break
        path.append((holder, part))
        holder = holder[part]
    # A section as a whole is not at fault, what it holds may be.
    if len(path) == len(location) or not isinstance(holder, dict):
        place, part = path[-1]
        del place[part]


def _stand_in(content: dict[str, Any]) -> None:
    """Values for the fields that have no default, without which none are judged together."""
    content.setdefault("name", "any")
    content.setdefault("data", {}).setdefault("source", ["any"])
    content.setdefault("model", {"base": "any"})


def _read(source: str | Path) -> str:
    text = str(source)
    if isinstance(source, str) and "\n" in source:
        return source
    if text in preset_names():
        return (resources.files("steadytrain.pipelines") / "presets" / f"{text}.yaml").read_text()
    path = Path(text)
    if not path.is_file():
        raise BadInput(
            f"configuration {text!r}: neither a preset nor a file",
            remedy=f"one of the presets {', '.join(preset_names())}, or the path of a YAML file",
        )
    return path.read_text(encoding="utf-8")


def _parse(text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInput(
            f"the configuration is not valid YAML: {redact(str(error))}",
            remedy="mend the line that is named",
        ) from error
    if not isinstance(content, dict):
        raise BadInput(
            f"the configuration is a {type(content).__name__}, not a mapping of sections",
            remedy="begin from a preset: `steadytrain schema` lists every field",
        )
    return content


def _override_items(overrides: Iterable[str] | Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for item in overrides:
        field, separator, value = item.partition("=")
        if not separator or not field:
            raise BadInput(
                f"override {redact(item)!r} is not of the form section.field=value",
                remedy="for example training.learning_rate=3e-4",
            )
        yield field.strip(), _scalar(value)


def _scalar(text: str) -> Any:
    value = yaml.safe_load(text)
    # YAML 1.1 reads 3e-4 as text, which nobody means.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(content: dict[str, Any], field: str, value: Any) -> None:
    *sections, last = field.split(".")
    place = content
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise BadInput(
                f"override {field!r}: {section!r} is not a section",
                remedy="`steadytrain schema` lists every field",
            )
        place = inner
    place[last] = value


def _version_problems(content: Mapping[str, Any]) -> Iterable[Problem]:
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        yield Problem(
            field="schema_version",
            value=repr(version),
            message=f"this version of steadytrain reads schema version {SCHEMA_VERSION}",
            remedy="install a newer steadytrain"
            if newer
            else f"write it anew for version {SCHEMA_VERSION} (`steadytrain schema`)",
        )


def _explain(item: Mapping[str, Any]) -> Problem:
    location = [part for part in item["loc"] if not str(part).startswith("function-")]
    field = ".".join(map(str, location)) or "configuration"
    kind, message = str(item["type"]), str(item["msg"]).removeprefix("Value error, ")
    value = redact(repr(item.get("input")))
    if kind == "at_odds":
        told = item["ctx"]
        return Problem(told["field"], redact(told["value"]), told["message"], told["remedy"])
    if kind == "missing":
        return Problem(field, "(missing)", "is required", f"set {field}")
    if kind == "extra_forbidden":
        return Problem(field, value, "no such field", _suggest(location))
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    return Problem(field, shown, message, f"change {field}; `steadytrain schema` tells its values")


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
