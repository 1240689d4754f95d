"""The Python API, from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import Any, Final

API: Final = {
    "steadytrain.components.shared.config": ("load", "from_mapping", "preset_names"),
    "steadytrain.components.preprocess.step": ("run",),
    "steadytrain.components.train.step": ("run", "run_stage", "Trainer"),
    "steadytrain.components.train.framework": ("Learner", "Learned", "LearnerTrainer"),
    "steadytrain.components.evaluate.step": ("run",),
    "steadytrain.components.register.step": ("run",),
    "steadytrain.components.report.step": ("run",),
    "steadytrain.components.tune.trials.local": ("local_trials",),
    "steadytrain.components.tune.trials.base": ("Trials", "TrialState", "Validation"),
    "steadytrain.components.tune.trials.retrain": ("retrain", "Retrained"),
    "steadytrain.pipelines.in_process": ("run", "RunResult"),
    "steadytrain.pipelines.server.submission": ("submit",),
    "steadytrain.components.tasks.base": ("Task", "TrainingTask", "Scorer", "Packager", "late"),
    "steadytrain.components.tasks.encoding.base": (
        "Encoder",
        "RowEncoder",
        "Content",
        "EncodedRecord",
        "EncodedRow",
        "TokenizerSettings",
        "Fitted",
    ),
    "steadytrain.components.tasks.encoding.fields": ("Defect",),
    "steadytrain.components.techniques.base": (
        "TrainingComponent",
        "TrainingContext",
        "Update",
    ),
    "steadytrain.components.shared.config.optimizers": ("OptimizerSpec", "StateTensor"),
    "steadytrain.components.shared.config.schedules": ("ScheduleSpec", "ScheduleSettings"),
    "steadytrain.components.shared.config.strategies": ("StrategySpec",),
    "steadytrain.components.shared.errors": (
        "SteadytrainError",
        "BadInput",
        "ConfigError",
        "DataError",
        "RunBusy",
        "StorageError",
        "TrackingError",
        "ServerError",
        "TrainingFailed",
        "Pruned",
    ),
}
"""By module: what a program may use."""


def page() -> str:
    """A section for each module."""
    intro = (
        "# Python API\n\n"
        "Importing these modules does not import torch; only training and scoring do. "
        "`steadytrain.pipelines.submit` is `steadytrain.pipelines.server.submission.submit`, and "
        "`steadytrain.pipelines.run` is `steadytrain.pipelines.in_process.run`. "
        "Every error that the product raises on purpose is a `SteadytrainError` with a message, "
        "a `remedy` and an `exit_code`.\n"
    )
    return "\n".join([intro, *(_module(name, names) for name, names in API.items())])


def _module(name: str, names: tuple[str, ...]) -> str:
    module = importlib.import_module(name)
    parts = [_item(item, getattr(module, item)) for item in names]
    return "\n".join([f"## {name}\n", *parts])


def _item(name: str, found: Any) -> str:
    if not inspect.isclass(found):
        return f"### {name}\n\n{_function(name, found)}"
    parts = [f"### {name}\n", _text(found)]
    for inner, method in vars(found).items():
        if inspect.isfunction(method) and method.__doc__ and not inner.startswith("_"):
            parts.append(_function(inner, method))
    return "\n".join(parts)


def _function(name: str, found: Any) -> str:
    signature = str(inspect.signature(found)).replace("'", "")
    text = textwrap.indent(inspect.getdoc(found) or "", "    ")
    return f"```text\n{name}{signature}\n\n{text}\n```\n"


def _text(found: Any) -> str:
    """The docstring; its lists of arguments keep their lines."""
    return f"```text\n{inspect.getdoc(found)}\n```\n"
