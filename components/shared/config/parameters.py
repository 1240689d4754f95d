"""The handful of parameters that a person changes in a form, and how they become a RunConfig.

A parameter left at "" or 0 leaves its field as the configuration says: a
Kubeflow form cannot leave a number out, and no default is stated twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from steadytrain.components.shared.config.load import load
from steadytrain.components.shared.config.run import RunConfig
from steadytrain.components.shared.errors import BadInput

FIELDS = {
    "run": "run",
    "output": "output",
    "data_source": "data.source",
    "base_model": "model.base",
    "global_batch_size": "training.global_batch_size",
    "learning_rate": "training.learning_rate",
    "num_train_epochs": "training.num_train_epochs",
}
"""Parameter of the pipeline: field of the configuration."""


EACH = "*"
"""In the parameter `run`: another run each time that the pipeline runs."""


def to_parameters(config: RunConfig, *, run: str) -> dict[str, Any]:
    """What a pipeline is given so that it does what a configuration says.

    Args:
        config: goes whole, as its YAML; `output` is said again, since its parameter has a default.
        run: identity of the run; EACH for another one each time.

    Raises:
        BadInput: `output` would be replaced on its way.
    """
    if "{{" in config.output:
        raise BadInput(
            f"output = {config.output!r} has {{{{ in it, which KFP and Argo replace",
            remedy="give a folder of another name",
        )
    named = config.model_copy(update={"run": None if EACH in run else run})
    parameters = {"config": _unreplaced(named.to_yaml()), "output": config.output}
    return {**parameters, "run": run} if EACH in run else parameters


def _unreplaced(text: str) -> str:
    """The same configuration, without what KFP ({{$...}}) and Argo ({{...}}) would replace.

    As JSON, which is YAML too: there, any character can be written by its number.
    """
    if "{{" not in text:
        return text
    return json.dumps(yaml.safe_load(text), indent=1).replace("{{", r"\u007b\u007b")


def from_parameters(
    *, config: str, overrides: Mapping[str, Any], job: str = "", **named: str | float
) -> RunConfig:
    """The configuration that a pipeline's parameters state.

    Args:
        config: a preset's name, a path, or YAML text.
        overrides: fields by dotted name, such as {"training.max_steps": 100}.
        job: KFP's id of its run, whose beginning takes the place of EACH in `run`.
        named: values of FIELDS; "" and 0 stand for "as the configuration says".

    Raises:
        ConfigError: with every problem.
        BadInput: `overrides` is not a mapping, or a field is given twice.
    """
    if not isinstance(overrides, Mapping):
        raise BadInput(
            f"overrides = {json.dumps(overrides)[:80]} is not a mapping",
            remedy='give JSON such as {"training.max_steps": 100}',
        )
    if "run" in named:
        named["run"] = str(named["run"]).replace(EACH, job[:8])
    given: dict[str, Any] = {
        FIELDS[name]: value for name, value in named.items() if value not in ("", 0)
    }
    twice = sorted(given.keys() & overrides.keys())
    if twice:
        raise BadInput(
            f"{', '.join(twice)}: given by a parameter and in overrides",
            remedy="take it out of one of them",
        )
    if "data.source" in given:
        given["data.source"] = str(given["data.source"]).split(",")
    if "model.base" in given:
        given["model.config"] = {}
    stated: dict[str, Any] = {**given, **overrides}
    return load(config, stated)
