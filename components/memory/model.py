"""The configured model, without network access and without its weights."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from steadytrain.components.memory.shape import Shape, has_formula, shape_of
from steadytrain.components.shared.config import ModelConfig, RunConfig
from steadytrain.components.shared.config.document import find_unfit, read
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.paths import local_path
from steadytrain.components.tasks.base import load_task, open_encoder
from steadytrain.components.techniques.dropout import dropout_fields

if TYPE_CHECKING:
    from steadytrain.components.memory.groups import Group

_ELSEWHERE: Final = ("s3:", "models:")
ASSUMED_LABELS: Final = 2
"""Classes if a classification's labels are not configured; they use almost no memory."""
ONE_OUTPUT: Final = 1
"""Classes that stand for a model that predicts a number, or without a head: one is nearly none."""


def model_shape(config: RunConfig) -> Shape:
    """Return the sizes of the configured model, by formula.

    Raises:
        BadInput: its architecture is unknown, or has no formula.
    """
    return shape_of(architecture_of(config.model), labels=label_count(config))


def any_model_shape(config: RunConfig) -> Shape:
    """Return the sizes of any model that Transformers can build.

    Raises:
        BadInput: its architecture is unknown, or can't be built here.
    """
    architecture, labels = architecture_of(config.model), label_count(config)
    shape = any_shape(architecture, labels)
    frozen = sum(group.parameters for group in model_groups(config) if group.unfreeze_at is None)
    if not frozen:
        return shape
    # Imported late, because it imports torch.
    from steadytrain.components.memory.trace import traced_still

    return replace(shape, frozen=frozen, still=traced_still(config, architecture, labels))


def model_groups(config: RunConfig) -> Sequence[Group]:
    """Return the parameter groups; empty if all are trained alike, or torch is not installed.

    Raises:
        BadInput: they do not fit the model, or it can't be built here.
    """
    training = config.training
    configured = training.param_groups or training.layer_decay is not None
    if not configured or importlib.util.find_spec("torch") is None:
        return ()
    # Imported late, because it imports torch.
    from steadytrain.components.memory.trace import traced_groups

    return traced_groups(config, architecture_of(config.model), label_count(config))


def any_shape(architecture: Mapping[str, Any], labels: int = 0) -> Shape:
    """Return the shape by formula, or for architectures without one by a trace on fake tensors.

    Args:
        architecture, labels: as for `shape_of`.

    Raises:
        BadInput: there is no formula, and torch is not installed or Transformers can't build the
            model.
    """
    if has_formula(architecture) or importlib.util.find_spec("torch") is None:
        return shape_of(architecture, labels=labels)
    # Imported late, because it imports torch.
    from steadytrain.components.memory.trace import traced_shape

    return traced_shape(architecture, labels)


def label_count(config: RunConfig) -> int:
    """Return the outputs of a head on whole texts; 0 for a language model's head."""
    task = load_task(config.data.task)
    if task.contrasts or task.regresses:
        return ONE_OUTPUT
    if not open_encoder(config.data).labeled:
        return 0
    return sum(len(part.labels or ()) or ASSUMED_LABELS for part in config.data.by_part().values())


def model_name(config: RunConfig) -> str:
    """Return the model's name, as people know it."""
    if config.model.base is None:
        return f"{config.model.config.get('model_type', 'a fused model')} from scratch"
    return config.model.base.removeprefix("hub:")


def architecture_of(model: ModelConfig) -> Mapping[str, Any]:
    """Return Transformers' configuration of the model to train.

    Raises:
        BadInput: it can't be determined from here, or it has no such dropout.
    """
    architecture = _as_published(model)
    size = architecture.get("vocab_size")
    if isinstance(size, int) and "vocab_size" not in model.config:
        architecture = {**architecture, "vocab_size": size + len(model.added_tokens)}
    return {**architecture, **dropout_fields(model.dropout, str(architecture.get("model_type")))}


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
    path = resources.files("steadytrain.components.memory") / "architectures.yaml"
    content: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content
