"""The architecture of a configured model, without network access and without weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from steadytrain.components.shared.config import ModelConfig
from steadytrain.components.shared.config.document import read
from steadytrain.components.shared.config.plain import find_unfit
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.paths import local_path
from steadytrain.components.techniques.dropout import dropout_fields

_ELSEWHERE: Final = ("s3:", "models:")


def architecture_of(model: ModelConfig) -> Mapping[str, Any]:
    """Return Transformers' configuration of the model to train.

    Raises:
        BadInput: it can't be determined from here, or it has no such dropout.
    """
    found = _as_published(model)
    size = found.get("vocab_size")
    if isinstance(size, int) and "vocab_size" not in model.config:
        found = {**found, "vocab_size": size + len(model.added_tokens)}
    return {**found, **dropout_fields(model.dropout, str(found.get("model_type")))}


def _as_published(model: ModelConfig) -> Mapping[str, Any]:
    if model.base is None:
        return {"vocab_size": model.vocab_size, **model.config}
    if model.base.startswith("hub:"):
        return _of_hub(model.base.removeprefix("hub:"))
    if model.base.startswith(_ELSEWHERE):
        raise BadInput(
            f"model.base = {model.base!r}: its configuration is not on this machine, and a plan "
            "uses no network",
            remedy="give a folder that has its config.json, or the name of a well-known model "
            "as hub:NAME",
        )
    if model.base.startswith("package:"):
        # Imported late, because it imports S3.
        from steadytrain.components.shared.model_source import package_folder

        return _of_folder(package_folder(model.base.removeprefix("package:")))
    return _of_folder(local_path(model.base))


def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the architectures that come with steadytrain, by their hub names."""
    models: Mapping[str, Mapping[str, Any]] = _table()["models"]
    return models


def _of_hub(name: str) -> Mapping[str, Any]:
    models, same = known_models(), _table()["same_as"]
    canonical = {known.lower(): known for known in models}
    canonical |= {alias.lower(): known for alias, known in same.items()}
    known = canonical.get(name.lower())
    if known is None:
        raise BadInput(
            f"model.base = 'hub:{name}': steadytrain has no built-in architecture of that name, "
            "and a plan uses no network",
            remedy="give a folder that has its config.json, or one of "
            f"{', '.join(sorted(models, key=str.lower))}",
        )
    return models[known]


def _of_folder(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    what = f"model.base: {path}"
    remedy = "give a model's folder with its config.json, or hub:NAME of a well-known model"
    text = read(path, what, remedy)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what} is not valid JSON", remedy=remedy) from error
    if not isinstance(content, dict):
        raise BadInput(f"{what} is a {type(content).__name__}, not a mapping", remedy=remedy)
    if unfit := next(find_unfit(content), None):
        raise BadInput(f"{what}: {unfit.field}: {unfit.message}", remedy=remedy)
    return content


@functools.cache
def _table() -> Mapping[str, Any]:
    place = resources.files("steadytrain.components.memory") / "architectures.yaml"
    content: Mapping[str, Any] = yaml.safe_load(place.read_text(encoding="utf-8"))
    return content
