"""The few parameters that people change in a form, and how they become a RunConfig.

A parameter of "" or 0 leaves its field as the configuration sets it. A Kubeflow form cannot leave a
number empty, and this way no default is stated twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from steadytrain.components.shared.config.load import load
from steadytrain.components.shared.config.run import RunConfig
from steadytrain.components.shared.errors import BadInput


@dataclass(frozen=True)
class Parameter:
    """A parameter of the pipelines, as their form shows it.

    default: its type is the parameter's type.
    field: the configuration field that it sets; "" if it sets none of its own.
    """

    name: str
    default: str | int | float | dict[str, Any]
    description: str
    field: str = ""


PARAMETERS: Final = (
    Parameter(
        "config",
        "causal-lm",
        "Name of a preset (causal-lm, chat, sequence-classification), or a complete configuration "
        "as YAML text.",
    ),
    Parameter(
        "run",
        "",
        "Name of the run. The same name continues the same run. Empty: derived from the "
        "configuration. An asterisk in it is replaced with the start of KFP's own run id, so that "
        "each start is a new run, as a schedule needs.",
        "run",
    ),
    Parameter(
        "output",
        "/mnt/steadytrain",
        "Folder on the volume for data, checkpoints and reports.",
        "output",
    ),
    Parameter(
        "data_source",
        "",
        "Files, folders, globs, s3:// addresses or hub:NAME, separated by commas.",
        "data.source",
    ),
    Parameter(
        "base_model",
        "",
        "Folder, s3:// address, hub:NAME or models:/NAME@ALIAS to start from.",
        "model.base",
    ),
    Parameter(
        "global_batch_size",
        0,
        "Sequences per optimizer step, over all ranks. 0: as configured.",
        "training.global_batch_size",
    ),
    Parameter(
        "learning_rate",
        0.0,
        "Peak learning rate. 0: as configured, or by the rules if the configuration leaves it "
        "open.",
        "training.learning_rate",
    ),
    Parameter(
        "num_train_epochs",
        0.0,
        "Passes over the training data. 0: as configured.",
        "training.num_train_epochs",
    ),
    Parameter("overrides", {}, 'Any other field, such as {"training.max_steps": 100}.'),
    Parameter(
        "volume",
        "steadytrain",
        "Claim of the volume that all steps share, mounted at /mnt/steadytrain.",
    ),
)
"""Every parameter of the pipelines, in the order of the form."""
FIELDS: Final = {item.name: item.field for item in PARAMETERS if item.field}
"""Configuration field for each pipeline parameter that sets one."""
EACH = "*"
"""In the parameter `run`, this makes each execution of the pipeline a new run."""


def to_parameters(config: RunConfig, *, run: str) -> dict[str, Any]:
    """Return the pipeline parameters that express a configuration.

    Args:
        config: passed in full as YAML. `output` is also passed separately, because that parameter
            has a default.
        run: the run's identity. If it contains EACH, each execution is a new run.

    Raises:
        BadInput: if KFP or Argo would replace a part of `output`.
    """
    if "{{" in config.output:
        raise BadInput(
            f"output = {config.output!r} contains {{{{, which KFP and Argo replace",
            remedy="use a folder whose name does not contain it",
        )
    named = config.model_copy(update={"run": None if EACH in run else run})
    parameters = {"config": _unreplaced(named.to_yaml()), "output": config.output}
    return {**parameters, "run": run} if EACH in run else parameters


def _unreplaced(text: str) -> str:
    """Return the same configuration without text that KFP ({{$...}}) or Argo ({{...}}) replaces.

    If it contains such text, write it as JSON. JSON is valid YAML, and can escape any character by
    its number.
    """
    if "{{" not in text:
        return text
    return json.dumps(yaml.safe_load(text), indent=1).replace("{{", r"\u007b\u007b")


def name_for(run: str, job: str) -> str:
    """Return a run's name with the start of KFP's run id in place of EACH."""
    return run.replace(EACH, job[:8])


def from_parameters(
    *, config: str, overrides: Mapping[str, Any], job: str = "", **named: str | float
) -> RunConfig:
    """Return the configuration that a pipeline's parameters describe.

    Args:
        config: the name of a preset, a path, or YAML text.
        overrides: fields by dotted name, such as {"training.max_steps": 100}.
        job: KFP's id of its run. Its first characters replace EACH in `run`.
        named: values for FIELDS. "" and 0 mean that the configuration decides.

    Raises:
        ConfigError: with every problem found.
        BadInput: if `overrides` is not a mapping, or a field is set twice.
    """
    if not isinstance(overrides, Mapping):
        raise BadInput(
            f"overrides = {json.dumps(overrides)[:80]} is not a mapping",
            remedy='give JSON such as {"training.max_steps": 100}',
        )
    if "run" in named:
        named["run"] = name_for(str(named["run"]), job)
    given: dict[str, Any] = {
        FIELDS[name]: value for name, value in named.items() if value not in ("", 0)
    }
    twice = sorted(given.keys() & overrides.keys())
    if twice:
        raise BadInput(
            f"{', '.join(twice)}: set both by a parameter and in overrides",
            remedy="set each in one place only",
        )
    if "data.source" in given:
        given["data.source"] = str(given["data.source"]).split(",")
    if "model.base" in given:
        given["model.config"] = {}
    stated: dict[str, Any] = {**given, **overrides}
    return load(config, stated)
